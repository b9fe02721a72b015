# SPDX-License-Identifier: Apache-2.0
"""The last step: beta's ref moves once, or the work branch is pushed."""

from __future__ import annotations

from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.git import Git, GitError
from b12x_overlay.sync.tips import Tips, moved


def refuse_checked_out(git: Git, branch: str, own: Path | None = None) -> None:
    """Refuse to move a branch that a work tree shows, or that a rebase or bisect in one will move back.

    Args:
        own: this run's temporary work tree.

    Raises:
        CommandError: *branch* is in use.
    """
    folder = ""
    for line in git.fields("worktree", "list", "--porcelain", "-z"):
        key, _, value = line.partition(" ")
        if key == "worktree":
            folder = value
            if (own is None or Path(folder) != own) and branch in _busy(Git(Path(folder))):
                raise _in_use(branch, folder, "a rebase or bisect there will move it")
        elif key == "branch" and value == f"refs/heads/{branch}":
            raise _in_use(branch, folder, "it is checked out there")


def _busy(work: Git) -> set[str]:
    """Branches that an unfinished rebase or bisect of a work tree will move."""
    if not work.folder.is_dir():
        return set()
    found = set()
    for name in ("rebase-merge/head-name", "rebase-apply/head-name", "BISECT_START"):
        told = work.run("rev-parse", "--git-path", name, ok=range(256))
        file = work.folder / told.text
        if told.code == 0 and file.is_file():
            found.add(
                file.read_text(encoding="utf-8", errors="replace")
                .strip()
                .removeprefix("refs/heads/")
            )
    return found


def _in_use(branch: str, folder: str, why: str) -> CommandError:
    return CommandError(
        f"{branch} cannot be moved: {why}, in {folder}; nothing was changed", reason="checked-out",
        hint=f"git -C {folder} switch --detach, or use --push",
    )  # fmt: skip


def land(git: Git, tips: Tips, result: str) -> None:
    """Move the local beta branch from its old tip to *result*, and only if canonical still is where it was.

    Raises:
        CommandError: a ref moved, or beta is checked out.
    """
    refuse_checked_out(git, tips.beta.branch)
    commands = ["start"]
    if tips.canonical.branch and tips.canonical.local:
        commands.append(f"verify refs/heads/{tips.canonical.branch} {tips.canonical.local}")
    commands += [
        f"update refs/heads/{tips.beta.branch} {result} {tips.beta.local}",
        "prepare",
        "commit",
    ]
    message = f"sync-beta: {tips.canonical.name} {tips.canonical.tip[:12]}"
    try:
        git.run(
            "update-ref",
            "-m",
            message,
            "--create-reflog",
            "--stdin",
            stdin="\n".join([*commands, ""]).encode(),
        )
    except GitError as error:
        raise moved(
            f"{tips.beta.branch} could not be moved from {tips.beta.local[:12]}: {error}"
        ) from error


def push(git: Git, tips: Tips, result: str) -> None:
    """Push *result* as the work branch, if that still is where this run found it.

    Raises:
        CommandError: it moved, or the remote refused.
    """
    ref = f"refs/heads/{tips.work_branch}"
    done = git.run(
        "push", "--porcelain", f"--force-with-lease={ref}:{tips.work}", "--", tips.remote, f"{result}:{ref}",
        ok=range(256),
    )  # fmt: skip
    if done.code == 0:
        return
    told = f"{done.err}\n{done.text}".strip()
    if "stale info" in told:
        raise moved(f"{tips.remote}/{tips.work_branch} moved during the run")
    raise CommandError(
        f"{tips.remote} did not take {tips.work_branch}; nothing was changed: {told}", reason="push",
        hint="check that this account may push branches there",
    )  # fmt: skip
