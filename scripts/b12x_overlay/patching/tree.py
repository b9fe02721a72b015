# SPDX-License-Identifier: Apache-2.0
"""Reads files below a folder without ever leaving it through a symbolic link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from b12x_overlay.patching.diff import safe_path
from b12x_overlay.patching.entry import Blocked, Entry, Found


class Tree:
    """A folder that holds ``vllm/``; the folder itself may be reached through links, nothing below it may."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, name: str) -> Path:
        """Where *name* lies on disk."""
        return self.root / safe_path(name)

    def obstacle(self, name: str) -> Blocked | None:
        """A symbolic link, or something that is not a folder, on the way to *name*."""
        at = os.fspath(self.root)
        for part in safe_path(name).split("/")[:-1]:
            at = f"{at}/{part}"
            try:
                mode = os.lstat(at).st_mode
            except FileNotFoundError:
                return None
            if stat.S_ISLNK(mode):
                to = Path(at).readlink()
                return Blocked(
                    "symlink", f"{at} is a symbolic link to {to}; links are not followed"
                )
            if not stat.S_ISDIR(mode):
                return Blocked("not-a-folder", f"{at} is not a folder")
        return None

    def read(self, name: str) -> Found:
        """The file at *name*, nothing, or why it is not touched."""
        if blocked := self.obstacle(name):
            return blocked
        path = self.path(name)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if path.is_symlink():
                return Blocked(
                    "symlink",
                    f"{path} is a symbolic link to {path.readlink()}; links are not followed",
                )
            return Blocked("unreadable", f"{path}: {error.strerror}")
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                return Blocked("not-a-file", f"{path} is not a plain file")
            return Entry(file.read(), bool(mode & 0o100))
