# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a repository, and what an unfinished one leaves behind.

``<git dir>/sync-beta/`` holds a lock, which dies with its process, and while a run has a work tree ``state.json``,
written before the work tree and its branch are made. A run that was killed is cleaned up by the next one, unless a
person had resolved a conflict in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git


@dataclass
class State:
    """An unfinished run: enough to go on with it or to take it away."""

    worktree: str
    branch: str
    start: str
    """The commit that picking started from."""
    tips: dict[str, Any]
    options: dict[str, Any]
    waiting: bool = False
    """A person has to resolve a conflict, or has resolved one: the work tree holds work."""
    stopped_at: str = ""
    """The canonical commit whose pick conflicted."""
    landing: str = ""
    """The commit that was about to land or be pushed, once everything had passed."""


class Store:
    """The folder for lock and state in the repository's own folder, shared by all its work trees."""

    def __init__(self, git: Git) -> None:
        self._git = git
        common = git.text("rev-parse", "--path-format=absolute", "--git-common-dir")
        self._folder = Path(common) / "sync-beta"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the repository's sync lock.

        Raises:
            CommandError: another run has it.
        """
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(
                    f"another sync runs in {self._git.folder}; nothing was changed", reason="locked",
                    hint="wait for it to end and run this again",
                ) from error  # fmt: skip
            yield  # the file stays: removing a lock that others may be waiting for lets two runs in

    def read(self) -> State | None:
        """The unfinished run, if there is one.

        Raises:
            CommandError: the file is damaged.
        """
        file = self._folder / "state.json"
        try:
            return State(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CommandError(
                f"{file} is damaged: {error}", code=ExitCode.FAILED, reason="state",
                hint=f"look for its work tree with git worktree list, then remove it and {file}",
            ) from error  # fmt: skip

    def write(self, state: State) -> None:
        """Replace the state in one step."""
        partial = self._folder / f"state.json.{os.getpid()}"
        partial.write_text(json.dumps(vars(state), indent=2) + "\n", encoding="utf-8")
        partial.replace(self._folder / "state.json")

    def discard(self, state: State) -> None:
        """Take the work tree, its branch and the state away; each may be missing already."""
        self._git.run("worktree", "remove", "--force", "--force", state.worktree, ok=range(256))
        shutil.rmtree(state.worktree, ignore_errors=True)
        self._git.run("update-ref", "-d", f"refs/heads/{state.branch}", ok=range(256))
        with suppress(OSError):
            Path(state.worktree).parent.rmdir()
        (self._folder / "state.json").unlink(missing_ok=True)
