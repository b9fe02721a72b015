# SPDX-License-Identifier: Apache-2.0
"""Reads what each line has that the other lacks: commits, the files they touch, their patch-ids, their trailers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from b12x_overlay.console import CommandError
from b12x_overlay.git import Git

_PICKED = re.compile(r"^\(cherry picked from commit ([0-9a-f]{7,64})\)$")
_REVERTS = re.compile(r"^This reverts commit ([0-9a-f]{7,64})\b", re.MULTILINE)
HAND_TRAILER = "Sync-Resolved-By-Hand"
"""Trailer of a pick that conflicted: the paths a person resolved, one for each trailer."""


@dataclass(frozen=True)
class Change:
    """One file as one commit changes it (renames are a deletion and an addition)."""

    status: str
    old_mode: str
    new_mode: str
    old: str
    new: str
    path: str


@dataclass(frozen=True)
class Commit:
    """A commit of one line that the other lacks."""

    id: str
    parents: tuple[str, ...]
    author: str
    mail: str
    message: str
    changes: tuple[Change, ...] = ()
    patch: str = ""
    """Stable patch-id, whitespace included; '' for merges and for commits that change nothing."""
    own: tuple[str, ...] = ()
    """For a merge of canonical: the paths where it differs from the automatic merge of its parents."""

    @property
    def subject(self) -> str:
        return self.message.split("\n", 1)[0].strip()

    @property
    def is_merge(self) -> bool:
        return len(self.parents) > 1

    @cached_property
    def paths(self) -> frozenset[str]:
        return frozenset(change.path for change in self.changes)

    @cached_property
    def picked_from(self) -> tuple[tuple[str, ...], ...]:
        """The commits that picked-from trailers name.

        A pick of a pick has its trailers one below the other: any of them names this change. A squash of several
        picks has them apart: each group is a change of its own.
        """
        groups: list[list[str]] = []
        together = False
        for line in self.message.split("\n"):
            found = _PICKED.match(line.strip())
            if found and together:
                groups[-1].append(found[1])
            elif found:
                groups.append([found[1]])
            together = bool(found)
        return tuple(tuple(group) for group in groups)

    @cached_property
    def reverts(self) -> str:
        """The commit that this one says it reverts, or ''."""
        found = _REVERTS.search(self.message)
        return found[1] if found else ""

    @cached_property
    def resolved_by_hand(self) -> tuple[str, ...]:
        """Paths that a person resolved in this very pick, not in one that it was picked from."""
        mark = f"{HAND_TRAILER}: "
        found: list[str] = []
        for line in self.message.split("\n"):
            if _PICKED.match(line.strip()):
                found.clear()
            elif line.startswith(mark):
                found.append(line.removeprefix(mark))
        return tuple(found)


@dataclass(frozen=True)
class History:
    """Both lines since they parted."""

    canonical: tuple[Commit, ...]
    """Commits that beta lacks, oldest first, merges included."""
    beta: tuple[Commit, ...]
    """Commits that canonical lacks, oldest first, merges included."""
    canonical_tip: str
    beta_tip: str
    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each merge: the commits that it brought into its first parent's line."""

    @cached_property
    def canonical_by_id(self) -> dict[str, Commit]:
        return {commit.id: commit for commit in self.canonical}

    @cached_property
    def beta_by_id(self) -> dict[str, Commit]:
        return {commit.id: commit for commit in self.beta}


def read_history(git: Git, canonical: str, beta: str) -> History:
    """Read what *canonical* and *beta* have of their own.

    Raises:
        CommandError: they have no common history.
    """
    if git.run("merge-base", canonical, beta, ok=(0, 1)).code:
        raise CommandError(
            f"{canonical[:12]} (canonical) and {beta[:12]} (beta) have no common history",
            reason="unrelated", hint="check --canonical and --beta",
        )  # fmt: skip
    sides = []
    for there, here in ((beta, canonical), (canonical, beta)):
        commits = _commits(git, f"{there}..{here}")
        own = _own_content(git, f"{there}..{here}") if here == canonical else {}
        sides.append(_with_details(git, commits, own))
    return History(sides[0], sides[1], canonical, beta, _merged(sides[0]) | _merged(sides[1]))


def _commits(git: Git, span: str) -> list[Commit]:
    shape = "--format=%H%x00%P%x00%an%x00%ae%x00%B"
    fields = git.fields("log", "-z", "--topo-order", "--reverse", shape, span)
    return [
        Commit(one, tuple(parents.split()), author, mail, message)
        for one, parents, author, mail, message in zip(*[iter(fields)] * 5, strict=True)
    ]


def _with_details(
    git: Git, commits: Sequence[Commit], own: dict[str, tuple[str, ...]]
) -> tuple[Commit, ...]:
    plain = [commit.id for commit in commits if not commit.is_merge]
    changes = read_changes(git, plain)
    patches = patch_ids(git, plain)
    return tuple(
        Commit(
            commit.id, commit.parents, commit.author, commit.mail, commit.message,
            changes.get(commit.id, ()), patches.get(commit.id, ""), own.get(commit.id, ()),
        )
        for commit in commits
    )  # fmt: skip


def read_changes(git: Git, commits: Iterable[str]) -> dict[str, tuple[Change, ...]]:
    """The files that each of *commits* (no merges) touches."""
    stdin = "".join(f"{one}\n" for one in commits).encode()
    if not stdin:
        return {}
    fields = git.fields(
        "diff-tree", "--stdin", "-r", "-z", "--raw", "--root", "--no-renames", stdin=stdin
    )
    found: dict[str, list[Change]] = {}
    commit = ""
    tokens = iter(fields)
    for token in tokens:
        if token.startswith(":"):
            found[commit].append(parse_change(token, next(tokens)))
        else:
            commit = token
            found[commit] = []
    return {commit: tuple(changes) for commit, changes in found.items()}


def read_renames(git: Git, commits: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """The files that each of *commits* (no merges) renames, old name and new."""
    stdin = "".join(f"{one}\n" for one in commits).encode()
    if not stdin:
        return {}
    tokens = iter(
        git.fields(
            "diff-tree",
            "--stdin",
            "-r",
            "-z",
            "-M",
            "--name-status",
            "--diff-filter=R",
            "--root",
            stdin=stdin,
        )
    )
    found: dict[str, list[tuple[str, str]]] = {}
    commit = ""
    for token in tokens:
        if re.fullmatch(r"R\d+", token):
            found[commit].append((next(tokens), next(tokens)))
        else:
            commit = token
            found[commit] = []
    return found


def parse_change(meta: str, path: str) -> Change:
    """A line of git's raw diff format and its path."""
    old_mode, new_mode, old, new, status = meta[1:].split(" ")
    return Change(status[0], old_mode, new_mode, old, new, path)


def patch_ids(git: Git, commits: Iterable[str], *, reverse: bool = False) -> dict[str, str]:
    """Stable patch-ids that keep whitespace (indentation is meaning in Python) and cover modes and binary files.

    Args:
        commits: ids of commits, each alone or with the parent to compare with behind a blank (for merges).
        reverse: of the commits' reversed diffs.
    """
    stdin = "".join(f"{one}\n" for one in commits).encode()
    if not stdin:
        return {}
    # git swaps the prefixes of a reversed diff, and they are part of the patch-id
    flags = ["-R", "--src-prefix=b/", "--dst-prefix=a/"] if reverse else []
    diff = git.run(
        "diff-tree", "--stdin", "-p", "-r", "--root", "--binary", "--full-index", "--no-renames", "--no-ext-diff",
        "--no-textconv", *flags, stdin=stdin,
    ).out  # fmt: skip
    ids = (line.split(" ") for line in git.lines("patch-id", "--verbatim", stdin=diff))
    return {commit: patch for patch, commit in ids}


def _own_content(git: Git, span: str) -> dict[str, tuple[str, ...]]:
    """For each merge of *span*: the paths where it is not what git makes of its parents."""
    told = git.text(
        "log",
        "-z",
        "--merges",
        "--remerge-diff",
        "--name-only",
        "--no-renames",
        "--format=%x01%H",
        span,
    )
    found = {}
    for record in told.split("\1")[1:]:
        commit, *paths = (part.strip("\n") for part in record.split("\0"))
        found[commit] = tuple(path for path in paths if path)
    return found


def _merged(commits: Sequence[Commit]) -> dict[str, tuple[str, ...]]:
    """What each merge brought: its commits that are not reachable from its first parent (within *commits*)."""
    parents = {commit.id: commit.parents for commit in commits}
    found = {}
    for commit in commits:
        if not commit.is_merge:
            continue
        first = set(_reachable(parents, commit.parents[:1]))
        found[commit.id] = tuple(
            one for one in _reachable(parents, commit.parents[1:]) if one not in first
        )
    return found


def _reachable(parents: dict[str, tuple[str, ...]], start: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    queue = [one for one in start if one in parents]
    while queue:
        one = queue.pop()
        if one not in seen:
            seen.add(one)
            yield one
            queue += [parent for parent in parents[one] if parent in parents]
