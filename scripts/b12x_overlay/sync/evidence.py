# SPDX-License-Identifier: Apache-2.0
"""Decides which canonical commits beta has already, each by named evidence.

In this order, and every beta commit serves as evidence once only (a change that was reverted and landed again needs
a second twin):

1. *trailer*: a beta commit says it was picked from the canonical one, or the canonical one says it was picked from
   a beta commit, or both say they were picked from the same third commit;
2. *patch-id*: equal stable patch-id, of a commit or of all that one merge brought;
3. *fragment*: the commit adds fragments that are on beta with the same blob, and beta has touched the same code;
4. *empty pick*: found while picking.

And two guards against stale code, where a pick would succeed and bring back what beta has had and left: *absorbed*
(a larger beta commit made the very same change to the commit's files) and *undone* (a beta commit is its exact
reverse).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from b12x_overlay.git import Git
from b12x_overlay.sync.history import Change, Commit, History, patch_ids


@dataclass(frozen=True)
class Evidence:
    """Why a canonical commit is not brought."""

    kind: str
    """trailer, patch-id, fragment, empty pick, absorbed, undone."""
    detail: str
    twins: tuple[str, ...] = ()
    """The beta commits that carry the change."""


@dataclass
class Matching:
    """Evidence for canonical commits, by id, and the beta commits that have served."""

    found: dict[str, Evidence] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def add(self, commit: str, kind: str, detail: str, twins: Iterable[str] = ()) -> None:
        twins = tuple(twins)
        self.found[commit] = Evidence(kind, detail, twins)
        self.used.update(twins)


def find_evidence(
    git: Git, history: History, folder: str, beta_fragments: dict[str, str]
) -> Matching:
    """Evidence for each canonical commit that beta has already.

    Args:
        folder: the fragment folder's path in the repository.
        beta_fragments: path to blob id of the fragments on beta's tip.
    """
    matching = Matching()
    _by_trailer_on_beta(history, matching)
    _by_trailer_on_canonical(git, history, matching)
    _by_patch_id(git, history, matching)
    _by_fragment(history, matching, folder, beta_fragments)
    _absorbed(history, matching, folder)
    _undone(git, history, matching)
    return matching


def _open(history: History, matching: Matching) -> list[Commit]:
    return [one for one in history.canonical if one.id not in matching.found and not one.is_merge]


def _free(history: History, matching: Matching) -> list[Commit]:
    return [one for one in history.beta if one.id not in matching.used and not one.is_merge]


def _resolver(ids: Iterable[str]) -> Callable[[str], str | None]:
    """Finds a full id by a trailer's, which may be shortened; None if it is not there or ambiguous."""
    full = set(ids)
    by_prefix = defaultdict(list)
    for one in full:
        by_prefix[one[:7]].append(one)

    def resolve(cited: str) -> str | None:
        if cited in full:
            return cited
        candidates = [one for one in by_prefix[cited[:7]] if one.startswith(cited)]
        return candidates[0] if len(candidates) == 1 else None

    return resolve


def _by_trailer_on_beta(history: History, matching: Matching) -> None:
    resolve = _resolver(history.canonical_by_id)
    for twin in history.beta:
        for cited in (cited for group in twin.picked_from for cited in group):
            target = resolve(cited)
            if target is None or target in matching.found:
                continue
            matching.add(
                target, "trailer", f"beta's {twin.id[:12]} says it was picked from it", [twin.id]
            )
            for brought in history.merged.get(target, ()):
                if brought in history.canonical_by_id and brought not in matching.found:
                    detail = f"beta's {twin.id[:12]} was picked from merge {target[:12]}, which brought it"
                    matching.add(brought, "trailer", detail, [twin.id])


def _by_trailer_on_canonical(git: Git, history: History, matching: Matching) -> None:
    resolve = _resolver(history.beta_by_id)
    sources: dict[str, list[str]] = defaultdict(list)
    for twin in history.beta:
        for group in twin.picked_from:
            for cited in group:
                sources[cited].append(twin.id)
    for commit in history.canonical:
        if commit.id in matching.found or not commit.picked_from:
            continue
        twins: list[str] = []
        for group in commit.picked_from:
            found = _group_twin(git, commit, group, history.beta_tip, resolve, sources, matching)
            if found is None:
                break
            twins.append(found)
        else:
            names = ", ".join(one[:12] for one in twins)
            matching.add(commit.id, "trailer", f"it says it was picked from beta's {names}",
                         [one for one in twins if one in history.beta_by_id])  # fmt: skip


def _group_twin(
    git: Git, commit: Commit, group: tuple[str, ...], beta_tip: str, resolve: Callable[[str], str | None],
    sources: dict[str, list[str]], matching: Matching,
) -> str | None:  # fmt: skip
    for cited in group:
        own = resolve(cited)
        for twin in ([own] if own else []) + sources.get(cited, []):
            if twin not in matching.used:
                return twin
        if own is None and not sources.get(cited):
            # On beta through a merge of the lines, yet not behind the commit itself: then it is the twin. Behind the
            # commit itself it is an old change that canonical landed a second time.
            full = git.commit(cited)
            if (
                full
                and _is_ancestor(git, full, beta_tip)
                and not _is_ancestor(git, full, commit.id)
            ):
                return full
    return None


def _is_ancestor(git: Git, older: str, newer: str) -> bool:
    return git.run("merge-base", "--is-ancestor", older, newer, ok=(0, 1)).code == 0


def _by_patch_id(git: Git, history: History, matching: Matching) -> None:
    twins: dict[str, list[Commit]] = defaultdict(list)
    for twin in _free(history, matching):
        if twin.patch:
            twins[twin.patch].append(twin)
    for commit in _open(history, matching):
        if commit.patch and twins[commit.patch]:
            twin = twins[commit.patch].pop(0)
            matching.add(
                commit.id, "patch-id", f"beta's {twin.id[:12]} is the same patch", [twin.id]
            )
    _whole_pull_requests(git, history, matching)


def _whole_pull_requests(git: Git, history: History, matching: Matching) -> None:
    """A pull request merged commit by commit on one line and squashed on the other."""
    groups = {
        merge.id: [one for one in history.merged[merge.id] if one in history.canonical_by_id]
        for merge in history.canonical
        if merge.is_merge and len(merge.parents) == 2
    }
    groups = {
        merge: ids for merge, ids in groups.items() if any(one not in matching.found for one in ids)
    }
    squashed = {twin.patch: twin.id for twin in _free(history, matching) if twin.patch}
    for merge, patch in patch_ids(git, _with_first_parent(history.canonical, groups)).items():
        if patch in squashed and squashed[patch] not in matching.used:
            for one in groups[merge]:
                if one not in matching.found:
                    detail = f"beta's {squashed[patch][:12]} is the same patch as all that merge {merge[:12]} brought"
                    matching.add(one, "patch-id", detail, [squashed[patch]])
    beta_merges = {
        merge.id: [one for one in history.merged[merge.id] if one in history.beta_by_id]
        for merge in history.beta
        if merge.is_merge and len(merge.parents) == 2
    }
    wanted = {commit.patch: commit for commit in _open(history, matching) if commit.patch}
    if not wanted:
        return
    for merge, patch in patch_ids(git, _with_first_parent(history.beta, beta_merges)).items():
        commit = wanted.get(patch)
        if (
            commit
            and commit.id not in matching.found
            and not matching.used.intersection(beta_merges[merge])
        ):
            detail = f"all that beta's merge {merge[:12]} brought is the same patch"
            matching.add(commit.id, "patch-id", detail, beta_merges[merge])


def _with_first_parent(commits: Iterable[Commit], merges: Container[str]) -> list[str]:
    return [f"{commit.id} {commit.parents[0]}" for commit in commits if commit.id in merges]


def _by_fragment(
    history: History, matching: Matching, folder: str, beta_fragments: dict[str, str]
) -> None:
    touched = {
        change.path
        for twin in history.beta
        for change in twin.changes
        if not _inside(change.path, folder)
    }
    adders = {
        (change.path, change.new): twin.id
        for twin in history.beta
        for change in twin.changes
        if _inside(change.path, folder)
    }
    pull_requests = [
        [
            history.canonical_by_id[one]
            for one in history.merged[merge.id]
            if one in history.canonical_by_id
        ]
        for merge in history.canonical
        if merge.is_merge and len(merge.parents) == 2
    ]
    singles = [[commit] for commit in _open(history, matching)]
    for group in singles + pull_requests:
        missing = [
            commit for commit in group if commit.id not in matching.found and not commit.is_merge
        ]
        changes = [change for commit in group for change in commit.changes]
        added = [
            change for change in changes if change.status == "A" and _inside(change.path, folder)
        ]
        code = {change.path for change in changes if not _inside(change.path, folder)}
        if not missing or not added or (code and not code & touched):
            continue
        if all(beta_fragments.get(change.path) == change.new for change in added):
            twins = sorted(
                {
                    adders[change.path, change.new]
                    for change in added
                    if (change.path, change.new) in adders
                }
            )
            names = ", ".join(change.path for change in added)
            for commit in missing:
                matching.add(commit.id, "fragment", f"beta has {names} with the same blob", twins)


def _absorbed(history: History, matching: Matching, folder: str) -> None:
    """Changes that a larger beta commit holds: the same files from the same to the same bytes."""
    made: Counter[tuple[str, ...]] = Counter()
    maker: dict[tuple[str, ...], Commit] = {}
    for twin in _free(history, matching):
        for change in twin.changes:
            made[_step(change)] += 1
            maker[_step(change)] = twin
    for commit in _open(history, matching):
        steps = [_step(change) for change in commit.changes if not _inside(change.path, folder)]
        if steps and all(made[step] for step in steps):
            made.subtract(steps)
            twin = maker[steps[0]]
            detail = f"beta's {twin.id[:12]} made the very same change to its files: {twin.subject}"
            matching.add(
                commit.id, "absorbed", detail
            )  # the rest of that commit is beta's own: it has not served


def _step(change: Change) -> tuple[str, ...]:
    return (change.path, change.old_mode, change.new_mode, change.old, change.new)


def _undone(git: Git, history: History, matching: Matching) -> None:
    """Changes that beta has taken back: one of its commits is the exact reverse."""
    undoing = {twin.patch: twin for twin in _free(history, matching) if twin.patch}
    candidates = (
        [commit.id for commit in _open(history, matching) if commit.changes] if undoing else []
    )
    for commit, patch in patch_ids(git, candidates, reverse=True).items():
        if patch in undoing:
            twin = undoing[patch]
            matching.add(
                commit,
                "undone",
                f"beta's {twin.id[:12]} takes exactly this change back: {twin.subject}",
            )


def _inside(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")
