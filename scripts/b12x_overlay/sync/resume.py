# SPDX-License-Identifier: Apache-2.0
"""Goes on after a conflict that a person resolved, or takes the unfinished sync away."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.git import Git
from b12x_overlay.lines import Lines
from b12x_overlay.sync.conflict import Clash, marked_places
from b12x_overlay.sync.held import Held
from b12x_overlay.sync.history import read_history
from b12x_overlay.sync.picking import commit_resolution, unmerged
from b12x_overlay.sync.plan import Step
from b12x_overlay.sync.record import is_record
from b12x_overlay.sync.state import State


def commands(work: Git, command: str, clashes: Sequence[Clash]) -> list[str]:
    """What to type to resolve the conflict and go on."""
    paths = " ".join(shlex.quote(path) for path in dict.fromkeys(clash.path for clash in clashes))
    return [
        f"cd {shlex.quote(str(work.folder))}",
        f"${{EDITOR:-vi}} {paths}    # choose, and take the markers out",
        f"git add {paths}    # git rm for a file that has to go; git checkout HEAD -- FILE to keep beta's",
        f"{command} --continue",
        f"{command} --abort    # or give the whole sync up",
    ]


def open_worktree(repo: Git, state: State | None, command: str) -> Git:
    """The work tree of the unfinished sync.

    Raises:
        CommandError: there is none, or it has gone.
    """
    if state is None:
        raise CommandError(
            f"no sync is unfinished in {repo.folder}",
            reason="no-run",
            hint=f"start one: {command} --help",
        )
    if not (Path(state.worktree) / ".git").exists():
        raise CommandError(
            f"the unfinished sync's work tree {state.worktree} has gone", reason="no-worktree",
            hint=f"{command} --abort, then start again",
        )  # fmt: skip
    return repo.at(Path(state.worktree))


def take_resolution(work: Git, stopped_at: str, held: Held, lines: Lines) -> None:
    """Commit the resolved pick, unless the user has done so.

    Raises:
        CommandError: unmerged files, conflict markers or unstaged changes are left.
    """
    left = unmerged(work)
    if left:
        raise _not_done(
            work,
            "these files are still in conflict: " + ", ".join(left),
            f"git add {shlex.join(left)}",
        )
    unstaged = work.fields("diff", "--name-only", "-z")
    if unstaged:
        raise _not_done(
            work, "not staged: " + ", ".join(unstaged), f"git add {shlex.join(unstaged)}"
        )
    picking = work.commit("CHERRY_PICK_HEAD")
    if picking is None:  # committed by the user, or taken back: then it is picked again
        _refuse_staged(work, held, lines)
        return
    if picking != stopped_at:
        raise _not_done(
            work, f"another pick is in progress, {picking[:12]}", "git cherry-pick --abort"
        )
    staged = work.fields("diff", "--cached", "--name-only", "-z", "--diff-filter=d", "HEAD")
    marked = [
        path
        for path in staged
        if marked_places(work.run("cat-file", "blob", f":{path}", ok=(0, 128)).out)
    ]
    if marked:
        raise _not_done(
            work,
            "conflict markers are left in " + ", ".join(marked),
            "take them out and git add again",
        )
    same = work.run("diff", "--cached", "--quiet", "HEAD", ok=(0, 1)).code == 0
    if same:
        commit_resolution(
            work, "Sync-Nothing-To-Bring: beta has this change in another form\n", empty=True
        )
    else:
        commit_resolution(work)


def _refuse_staged(work: Git, held: Held, lines: Lines) -> None:
    """Between two picks the index is as HEAD, but for what a killed run of this command left there."""
    staged = work.fields("diff", "--cached", "--name-only", "-z", "--no-renames", "HEAD")
    for path in [one for one in staged if is_record(one, lines)]:
        work.run("reset", "--quiet", "HEAD", "--", f":(literal){path}")
        work.run("clean", "--quiet", "--force", "-x", "--", f":(literal){path}")
        work.run("checkout", "--quiet", "HEAD", "--", f":(literal){path}", ok=(0, 1))
    own = [path for path in staged if path not in held and not is_record(path, lines)]
    if own:
        raise _not_done(work, "staged but not committed: " + ", ".join(own), "git commit")


def remaining(work: Git, start: str, steps: list[Step]) -> list[Step]:
    """The steps after the last one that the work tree's branch holds."""
    picks = read_history(work, start, "HEAD").beta
    picked = {cited for commit in picks for group in commit.picked_from for cited in group}
    last = max((index for index, step in enumerate(steps) if step.commit.id in picked), default=-1)
    return steps[last + 1 :]


def _not_done(work: Git, what: str, command: str) -> CommandError:
    return CommandError(
        f"{what} (in {work.folder}); nothing was changed",
        reason="unresolved",
        hint=f"cd {work.folder}; {command}",
    )
