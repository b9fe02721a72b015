# SPDX-License-Identifier: Apache-2.0
"""What differs between canonical and the synced beta, and why.

A difference is explained by a version pin that beta keeps, or by beta-only commits: commits of beta that stand for no
canonical change. Such a commit must touch the path, and for text the words that differ must be words that beta-only
commits added or removed there (counted, indentation included), so that a twin that differs from its canonical commit
is not hidden by a beta-only edit elsewhere in the same file. A pick whose conflict was resolved by hand explains the
files it names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from b12x_overlay.git import Git
from b12x_overlay.sync.held import Held
from b12x_overlay.sync.history import Change, Commit, parse_change

_WORD = re.compile(rb"^[ \t]+|[^\W]+|[^\w\s]", re.ASCII)


@dataclass(frozen=True)
class Difference:
    """One path that differs. *reason* is beta-only, kept pin or unexplained."""

    path: str
    status: str
    reason: str
    detail: str

    @property
    def explained(self) -> bool:
        return self.reason != "unexplained"

    def as_json(self) -> dict[str, str]:
        return {
            "path": self.path,
            "status": self.status,
            "reason": self.reason,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class _Words:
    plus: Counter[bytes]
    minus: Counter[bytes]


@dataclass(frozen=True)
class _Row:
    change: Change
    paths: tuple[str, ...]
    """All names of the file, that in the result last."""

    @property
    def path(self) -> str:
        return self.paths[-1]


def compare(
    git: Git,
    canonical: str,
    result: str,
    beta_only: Iterable[Commit],
    held: Held,
    renames: Iterable[tuple[str, str]],
) -> list[Difference]:
    """Every path that differs between *canonical* and *result*, explained as far as it can be.

    Args:
        beta_only: the commits of the result's line that stand for no canonical change, merges included.
        renames: names that one file had, two by two: what beta did under the old name counts for the new one.
    """
    tokens = iter(git.fields("diff-tree", "-r", "-z", "--raw", "-M", canonical, result))
    rows = []
    pairs = list(renames)
    for meta in tokens:
        path = next(tokens)
        paths = (path, next(tokens)) if meta.rsplit(" ", 1)[1][0] in "RC" else (path,)
        rows.append(_Row(parse_change(meta, paths[-1]), (*_other_names(paths, pairs), *paths)))
    known = (
        _BetaOnly(git, beta_only, [path for row in rows for path in row.paths]) if rows else None
    )
    differences = []
    for row in rows:
        pin = held.pin(row.path)
        assert known is not None
        why = ("kept pin", pin.why) if pin else _explain(git, canonical, result, row, known)
        differences.append(Difference(row.path, row.change.status, *why))
    return differences


def _other_names(paths: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Further names that the file had on its way."""
    names = dict.fromkeys(paths)
    known = len(names)
    pairs = list(pairs)
    while True:
        names |= {old: None for old, new in pairs if new in names} | {
            new: None for old, new in pairs if old in names
        }
        if len(names) == known:
            return [name for name in names if name not in paths]
        known = len(names)


def _explain(
    git: Git, canonical: str, result: str, row: _Row, beta_only: _BetaOnly
) -> tuple[str, str]:
    resolved = [one for one in beta_only.commits.values() if row.path in one.resolved_by_hand]
    if resolved:
        return "beta-only", f"{_names(resolved)} (conflict resolved by hand)"
    ids = beta_only.touching(row.paths)
    if not ids:
        return "unexplained", "no beta-only commit touches it"
    commits = [beta_only.commits[one] for one in ids]
    names = _names(commits)
    changes = [
        change for commit in commits for change in commit.changes if change.path in row.paths
    ]
    lost = None
    if row.change.status in "AD":
        done = {"A": "adds", "D": "deletes"}[row.change.status]
        if row.change.status not in {change.status for change in changes}:
            lost = f"{done} it"
    elif row.change.old_mode != row.change.new_mode and row.change.new_mode not in {
        change.new_mode for change in changes if change.old_mode != change.new_mode
    }:
        lost = f"makes its mode {row.change.new_mode}"
    elif row.change.old != row.change.new:
        lost = _lost_content(git, canonical, result, row, beta_only, changes)
    if lost and not any(commit.is_merge and row.change.status in "AD" for commit in commits):
        return "unexplained", f"{names} touches it, but none of these {lost}"
    return "beta-only", names


def _lost_content(
    git: Git, canonical: str, result: str, row: _Row, beta_only: _BetaOnly, changes: list[Change]
) -> str | None:
    literal = [f":(literal){path}" for path in row.paths]
    diff = git.run(
        "diff-tree",
        "-p",
        "-U0",
        "-M",
        "--no-ext-diff",
        "--no-textconv",
        canonical,
        result,
        "--",
        *literal,
    ).out
    if re.search(rb"(?m)^Binary files ", diff):
        made = row.change.new in {change.new for change in changes}
        return None if made else f"makes its bytes {row.change.new[:12]}"
    differ = _words(diff)
    added, removed = beta_only.words(row.paths)
    rest = (differ.plus - differ.minus) - added, (differ.minus - differ.plus) - removed
    shown = [
        f"{sign}{word.decode('utf-8', 'replace').strip() or 'indentation'}"
        for sign, words in zip("+-", rest, strict=True)
        for word in list(words)[:6]
    ]
    return f"has the words {' '.join(shown)}" if shown else None


def _names(commits: list[Commit]) -> str:
    shown = ", ".join(f"{commit.id[:12]} {commit.subject}" for commit in commits[:3])
    return shown + (f" and {len(commits) - 3} more" if len(commits) > 3 else "")


class _BetaOnly:
    """The beta-only commits, with the words that each adds and removes in each of the paths in question.

    For merges that is what they changed beside git's own merge. A renamed file counts for both its names.
    """

    def __init__(self, git: Git, commits: Iterable[Commit], paths: Iterable[str]) -> None:
        self.commits = {commit.id: commit for commit in commits}
        self._words: dict[str, dict[str, _Words]] = {}
        if not self.commits:
            return
        stdin = (
            "".join(f"{one}\n" for one in self.commits)
            + "--\n"
            + "".join(f":(literal){one}\n" for one in paths)
        )
        log = git.run(
            "log", "--no-walk=unsorted", "--stdin", "-p", "-U0", "-M", "--remerge-diff", "--no-ext-diff",
            "--no-textconv", "--format=%x01%H", stdin=stdin.encode("utf-8", "surrogateescape"),
        ).out  # fmt: skip
        # No line of a diff's content starts with \1 or with "diff": each has its sign first.
        _, *records = re.split(rb"(?m)^\x01([0-9a-f]{40,64})$", log)
        for name, body in zip(records[::2], records[1::2], strict=True):
            for part in re.split(rb"(?m)^diff --git ", body)[1:]:
                words = _words(part)
                for path in _paths(part):
                    self._words.setdefault(path, {})[name.decode()] = words

    def touching(self, paths: Iterable[str]) -> list[str]:
        return list({one: None for path in paths for one in self._words.get(path, {})})

    def words(self, paths: Iterable[str]) -> tuple[Counter[bytes], Counter[bytes]]:
        """All words added and removed in *paths*."""
        plus: Counter[bytes] = Counter()
        minus: Counter[bytes] = Counter()
        for words in {
            one: words for path in paths for one, words in self._words.get(path, {}).items()
        }.values():
            plus += words.plus
            minus += words.minus
        return plus, minus


_SIDES = re.compile(rb"(?m)^(?:---|\+\+\+) (.*?)\t?$")
_RENAMED = re.compile(rb"(?m)^rename (?:from|to) (.*)$")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = {
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}


def _paths(part: bytes) -> set[str]:
    """The file's names in one file's diff (without the leading ``diff --git``)."""
    head = part.split(b"\n@@", 1)[0]
    sides = {_unquote(name) for name in _SIDES.findall(head)} - {b"/dev/null"}
    names = {_unquote(name) for name in _RENAMED.findall(head)}
    if (
        not sides and not names
    ):  # mode changes, binary and empty files have the first line only: a/NAME b/NAME
        first = head.split(b"\n", 1)[0]
        sides = {_unquote(first[: len(first) // 2])}
    return {
        name.decode("utf-8", "surrogateescape") for name in names | {side[2:] for side in sides}
    }


def _unquote(name: bytes) -> bytes:
    """A name as git prints it: in quotes, with escapes, where it holds special characters."""
    if not name.startswith(b'"'):
        return name
    return _ESCAPE.sub(
        lambda found: (
            bytes([int(found[1], 8)]) if len(found[1]) == 3 else _ESCAPED.get(found[1], found[1])
        ),
        name[1:-1],
    )


def _words(diff: bytes) -> _Words:
    plus: Counter[bytes] = Counter()
    minus: Counter[bytes] = Counter()
    in_hunk = False
    for line in diff.split(b"\n"):
        if line.startswith(b"@@"):
            in_hunk = True
        elif line.startswith(b"diff --git "):
            in_hunk = False
        elif in_hunk and line.startswith(b"+"):
            plus.update(_WORD.findall(line[1:]))
        elif in_hunk and line.startswith(b"-"):
            minus.update(_WORD.findall(line[1:]))
    return _Words(plus, minus)
