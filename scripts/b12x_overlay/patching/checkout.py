# SPDX-License-Identifier: Apache-2.0
"""What a git checkout's own files say, read without git (the container has none)."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from b12x_overlay.console import CommandError

_UNFINISHED = {
    "rebase-apply": "git am --abort (or git rebase --abort)",
    "rebase-merge": "git rebase --abort",
    "MERGE_HEAD": "git merge --abort",
    "CHERRY_PICK_HEAD": "git cherry-pick --abort",
    "REVERT_HEAD": "git revert --abort",
}


def git_dir(root: Path) -> Path | None:
    """The git folder of the checkout whose top is *root*; None if *root* is not the top of one.

    A repository further up (a virtual environment below a project) is none of our business.
    """
    entry = root / ".git"
    if entry.is_dir():
        return entry
    try:
        text = entry.read_bytes()
    except OSError:
        return None
    if not text.startswith(b"gitdir: "):
        return None
    return (root / os.fsdecode(text[len(b"gitdir: ") :].strip())).resolve()


def refuse_unfinished(root: Path) -> None:
    """Stop if git itself is in the middle of something in *root*.

    Raises:
        CommandError: an am, rebase, merge, cherry-pick or revert is unfinished, or the index is locked.
    """
    folder = git_dir(root)
    if folder is None:
        return
    for name, command in _UNFINISHED.items():
        if (folder / name).exists():
            raise CommandError(
                f"{folder / name} exists: an earlier git command stopped half-way in {root}; nothing was changed",
                reason="git-unfinished",
                hint=f"finish it, or: cd {shlex.quote(str(root))} && {command}",
            )
    lock = folder / "index.lock"
    if lock.exists():
        raise CommandError(
            f"{lock} exists: another git command is running in {root}, or one crashed; nothing was changed",
            reason="git-locked",
            hint=f"wait for it; if no git process is running: rm {shlex.quote(str(lock))}",
        )
