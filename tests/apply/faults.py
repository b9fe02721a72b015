# SPDX-License-Identifier: Apache-2.0
"""Stops a run at a chosen write, in a forked child, without any hook in the code under test.

Python's audit events name every call that changes the file system; ``os.write`` and ``os.fsync`` have none and are
wrapped. Each such call below the watched folder counts as one point.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EVENTS = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
)
FILLING = ("open", "os.mkdir", "write", "fsync")
"""Points at which a full disk shows."""

DONE, KILLED = "done", "killed"


def points(root: Path, action: Callable[[], object]) -> list[str]:
    """What *action* does to the disk, point by point."""
    end, seen = stop_at(-1, root, action, "kill")
    assert end == DONE
    return seen


def stop_at(
    point: int, root: Path, action: Callable[[], object], how: str
) -> tuple[str, list[str]]:
    """Run *action* in a child and stop it at *point* (from 0); how it ended, and the points seen.

    *how*: ``kill`` (SIGKILL, half of a write done), ``full-once`` or ``full`` (ENOSPC at that point, or from it on),
    ``interrupt`` (Ctrl-C).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _Faults(point, root, how, writer).run(action)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        seen = pipe.read().decode().split()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return KILLED, seen
    return (DONE if os.WEXITSTATUS(status) == 0 else f"exit {os.WEXITSTATUS(status)}"), seen


class _Faults:
    def __init__(self, point: int, root: Path, how: str, pipe: int) -> None:
        self.point = point
        self.root = os.fsencode(root)
        self.how = how
        self.pipe = pipe
        self.seen = 0
        self.write, self.fsync = os.write, os.fsync

    def run(self, action: Callable[[], object]) -> None:
        os.write, os.fsync = self._write, self._fsync  # type: ignore[assignment]
        sys.addaudithook(self._event)
        code = 0
        try:
            action()
        except (KeyboardInterrupt, Exception) as error:
            code = 9
            if type(error).__name__ not in ("CommandError", "KeyboardInterrupt"):
                traceback.print_exc()
                code = 8
        os._exit(code)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _mode, flags = args
            if isinstance(flags, int) and flags & _WRITE_FLAGS and self._ours(path):
                self._reach("open")
        elif event in _EVENTS and (isinstance(args[0], int) or self._ours(args[0])):
            self._reach(event)

    def _ours(self, path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.fsencode(path).startswith(
            self.root
        )

    def _write(self, handle: int, data: bytes) -> int:
        if handle == self.pipe:
            return self.write(handle, data)
        self._reach("write", lambda: self.write(handle, bytes(data[: len(data) // 2])))
        return self.write(handle, data)

    def _fsync(self, handle: int) -> None:
        self._reach("fsync")
        self.fsync(handle)

    def _reach(self, kind: str, half: Callable[[], object] = lambda: None) -> None:
        here, self.seen = self.seen, self.seen + 1
        self.write(self.pipe, f"{kind} ".encode())
        if here == self.point and self.how == "kill":
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        if here == self.point and self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        full = (
            here == self.point
            if self.how == "full-once"
            else self.how == "full" and here >= self.point
        )
        if full and kind in FILLING:
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
