# SPDX-License-Identifier: Apache-2.0
"""Writes a plan to a folder so that it is done wholly or not at all.

1. A journal names what will be written and where (state ``prepare``).
2. New contents go to temporary files beside their destinations, with mode and owner, and to disk.
3. The journal changes to ``commit``: from here on the run counts as done.
4. ``os.replace`` puts each file in place; deletions, compiled copies and empty folders follow; the journal goes.

A run that stops before step 3 is rolled back by the next one, a run that stops after it is rolled forward; both
need only the journal and the temporary files. Destinations are never opened for writing: a hard link to another
file (a package cache) keeps its bytes, and a symbolic link is never followed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from errno import EACCES, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import bytecode
from b12x_overlay.patching import journal as journals
from b12x_overlay.patching.entry import Change, Entry
from b12x_overlay.patching.tree import Tree

_SYNC_THREADS = 8
_NOT_WRITABLE = (EPERM, EACCES, EROFS)


def recover(tree: Tree) -> journals.Unfinished | None:
    """Finish or undo an interrupted run. The caller holds the lock."""
    left = journals.unfinished(tree)
    journal = journals.read(tree)
    journals.discard(tree.path(journals.JOURNAL + journals.TEMPORARY))
    if journal is None:
        return left
    if journal["state"] == "commit":
        _forget_foreign(tree, journal)
        _finish(tree, journal)
    else:
        _undo(tree, journal)
    return left


def run(tree: Tree, verb: str, changes: Sequence[Change]) -> None:
    """Carry out *changes*. The caller holds the lock and has called ``recover``.

    Raises:
        CommandError: a folder cannot be written, the disk is full; the tree is as it was.
    """
    if not changes:
        return
    journal = journals.plan(tree, verb, changes)
    try:
        journals.write(tree, journal)
        _stage(tree, journal, changes)
        journal["state"] = "commit"
        with _signals_held():
            journals.write(tree, journal)
            _finish(tree, journal)
    except OSError as error:
        _give_up(tree, journal, changes, error)
    except BaseException:
        recover(tree)
        raise


def _stage(tree: Tree, journal: dict[str, Any], changes: Sequence[Change]) -> None:
    for folder in journal["folders"]:
        path = tree.path(folder)
        path.mkdir()
        _take_after(path, path.parent)
    handles = []
    try:
        for change in changes:
            if blocked := tree.obstacle(change.path):
                raise CommandError(blocked.detail, reason=blocked.reason)
            if change.new is not None:
                handles.append(_write_temporary(tree, change.path, change.new))
            elif not os.access(tree.path(change.path).parent, os.W_OK):
                raise PermissionError(13, "not writable", str(tree.path(change.path).parent))
        _sync(handles)
    finally:
        for handle in handles:
            os.close(handle)


def _sync(handles: Sequence[int]) -> None:
    """Bring files to disk, several at a time: the file system then commits them together."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        for _ in pool.map(os.fsync, handles):
            pass  # raises what os.fsync raised


def _write_temporary(tree: Tree, name: str, entry: Entry) -> int:
    path = tree.path(name)
    temporary = journals.temporary(path)
    journals.discard(
        temporary
    )  # of a run whose journal is lost; the lock says that nobody else writes it now
    handle = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        view = memoryview(entry.data)
        while view:
            view = view[os.write(handle, view) :]
        try:
            like = path.lstat()
            mode = like.st_mode & 0o7777
        except FileNotFoundError:
            like = tree.path("vllm/__init__.py").lstat()
            mode = like.st_mode & 0o666
        if entry.executable != bool(mode & 0o100):
            mode = mode | (mode & 0o444) >> 2 if entry.executable else mode & ~0o111
        os.fchmod(handle, mode)
        _own(temporary, like)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _finish(tree: Tree, journal: dict[str, Any]) -> None:
    """Step 4; may run again over what is done already."""
    for name in journal["write"]:
        path = tree.path(name)
        temporary = journals.temporary(path)
        if temporary.exists():
            temporary.replace(path)
    for name in journal["delete"]:
        journals.discard(tree.path(name))
    bytecode.remove(tree.path(name) for name in [*journal["write"], *journal["delete"]])
    for name in journal["delete"]:
        _remove_empty(tree, tree.path(name).parent)
    journals.drop(tree)


def _forget_foreign(tree: Tree, journal: dict[str, Any]) -> None:
    """Leave alone what was replaced by somebody else since the interruption (a reinstall, an edit)."""
    for kind in ("write", "delete"):
        for name, digests in list(journal[kind].items()):
            found = tree.read(name)
            if isinstance(found, Entry) and found.sha256 not in digests:
                journals.discard(journals.temporary(tree.path(name)))
                del journal[kind][name]


def _undo(tree: Tree, journal: dict[str, Any]) -> None:
    for name in journal["write"]:
        journals.discard(journals.temporary(tree.path(name)))
    for name in reversed(journal["folders"]):
        with contextlib.suppress(OSError):  # not made yet, or somebody put a file there
            tree.path(name).rmdir()
    journals.drop(tree)


def _give_up(
    tree: Tree, journal: dict[str, Any], changes: Sequence[Change], error: OSError
) -> None:
    """Put the old content back after an error, as far as the disk lets us, and say where things stand."""
    where = Path(error.filename or tree.root)
    reason = error.strerror or str(error)
    done = "nothing was changed"
    try:
        journals.discard(tree.path(journals.JOURNAL + journals.TEMPORARY))
        _undo_all(tree, journal, changes)
    except OSError as second:
        done = f"undoing failed too ({second.strerror}); the next apply or revert finishes, status names it"
    if error.errno in _NOT_WRITABLE:
        folder = where if where.is_dir() else where.parent  # files are replaced, never opened
        raise CommandError(
            f"{folder} is not writable ({reason}); {done}",
            reason="not-writable",
            hint=f"make {folder} writable for this user, or run as its owner",
        ) from error
    raise CommandError(
        f"{where}: {reason}; {done}",
        code=ExitCode.FAILED,
        reason="io",
        hint="free some space there, then run the command again" if error.errno == ENOSPC else "",
    ) from error


def _undo_all(tree: Tree, journal: dict[str, Any], changes: Sequence[Change]) -> None:
    if journal["state"] == "commit":
        for change in changes:
            found = tree.read(change.path)
            if found == change.old:
                continue
            if change.old is None:
                journals.discard(tree.path(change.path))
                continue
            temporary = journals.temporary(tree.path(change.path))
            journals.discard(temporary)
            tree.path(change.path).parent.mkdir(parents=True, exist_ok=True)
            os.close(_write_temporary(tree, change.path, change.old))
            temporary.replace(tree.path(change.path))
        bytecode.remove(tree.path(change.path) for change in changes)
    _undo(tree, journal)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and a polite kill wait until the files are in place; SIGKILL is what the journal is for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda got, _frame: held.append(got)) for number in signals
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if held:
            os.kill(os.getpid(), held[0])


def _remove_empty(tree: Tree, folder: Path) -> None:
    while folder != tree.root and folder != tree.root / "vllm":
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return
        folder = folder.parent


def _take_after(path: Path, like: Path) -> None:
    status = like.lstat()
    path.chmod(status.st_mode & 0o777)
    _own(path, status)


def _own(path: Path, like: os.stat_result) -> None:
    """Give *path* the owner of *like* where this user may (root patching another user's tree)."""
    now = path.lstat()
    if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(path, like.st_uid, like.st_gid, follow_symlinks=False)
