# SPDX-License-Identifier: Apache-2.0
"""The pull request's branch: new picks go on top of it while it stands on beta's tip, else it is made anew."""

from __future__ import annotations

from b12x_overlay.console import CommandError
from b12x_overlay.git import Git
from b12x_overlay.lines import Lines
from b12x_overlay.sync.history import Commit, read_history
from b12x_overlay.sync.record import is_record
from b12x_overlay.sync.tips import Tips


def start_of(git: Git, tips: Tips, lines: Lines) -> str:
    """The commit to put the picks on.

    Raises:
        CommandError: the branch cannot go on and holds commits that this command did not make.
    """
    if not tips.work:
        return tips.beta.tip
    stands = git.run("merge-base", "--is-ancestor", tips.beta.tip, tips.work, ok=(0, 1)).code == 0
    commits = read_history(git, tips.beta.tip, tips.work).beta
    gone = _picked_from_elsewhere(git, commits, tips.canonical.tip)
    if stands and not gone:
        return tips.work
    foreign = [
        commit for commit in commits if not commit.picked_from and not _only_record(commit, lines)
    ]
    if foreign:
        why = (
            "canonical no longer has what it picked"
            if stands
            else f"it does not stand on {tips.beta.name}'s tip"
        )
        named = ", ".join(f"{commit.id[:12]} {commit.subject}" for commit in foreign[:5])
        raise CommandError(
            f"{tips.remote}/{tips.work_branch} has to be made anew ({why}), but holds commits that this command did "
            f"not make: {named}; nothing was changed", reason="work-branch",
            hint=f"land them on {tips.beta.name}, or keep them elsewhere and delete {tips.work_branch} at {tips.remote}",
        )  # fmt: skip
    return tips.beta.tip


def _picked_from_elsewhere(git: Git, commits: tuple[Commit, ...], canonical: str) -> bool:
    """Whether a pick's source is no longer on canonical (its line was rewritten)."""
    sources = [group[-1] for commit in commits for group in commit.picked_from[-1:]]
    known = [one for one in sources if git.commit(one)]
    if len(known) < len(sources):
        return True
    return any(
        git.run("merge-base", "--is-ancestor", one, canonical, ok=(0, 1)).code for one in known
    )


def _only_record(commit: Commit, lines: Lines) -> bool:
    return bool(commit.paths) and all(is_record(path, lines) for path in commit.paths)
