# SPDX-License-Identifier: Apache-2.0
"""One writer at a time per folder, without a lock file that a crash could leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_FALLBACK = ".b12x-overlay.lock"
_NO_FOLDER_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def exclusive(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold *folder* alone; *waiting* is called once if another run holds it.

    The lock is on the folder itself, so it leaves no file and the kernel drops it when the process ends, however it
    ends. File systems that cannot lock folders (NFS) get a lock file, which is removed afterwards.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            _take(handle, waiting)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise
            with _by_file(folder / _FALLBACK, waiting):
                yield
            return
        yield
    finally:
        os.close(handle)


@contextmanager
def _by_file(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    if not os.access(path.parent, os.W_OK):  # nothing can be written there, with or without a lock
        yield
        return
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _take(handle, waiting)
            if not _same_file(handle, path):  # its holder removed it while this run waited
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _take(handle: int, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(handle, fcntl.LOCK_EX)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
