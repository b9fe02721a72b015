# SPDX-License-Identifier: Apache-2.0
"""The folder a run works in until its result is whole, so that a later run can go on where this one stopped.

It lies beside the destination as ``.<name>.partial`` (same file system, so that the final rename is atomic). Its
``job.json`` says what is being made of which source files; a run that finds another job there refuses. The result
grows in a folder of its own below (`_PAYLOAD`), because its files have names that users chose, ``job.json`` included.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.csf.files import publish, write_json

_JOB = "job.json"
_LOCK = ".lock"
_PAYLOAD = "payload"
_LAYOUT = 2  # 1, without the number, kept the payload beside the job; it is refused as another job


def work_path(target: Path) -> Path:
    """Where a run that makes *target* works."""
    return target.with_name(f".{target.name}.partial")


def remove_command(target: Path) -> str:
    """What removes the work folder of *target*, to be pasted into a shell."""
    return f"rm -r {shlex.quote(str(work_path(target)))}"


def fingerprint(paths: list[Path]) -> dict[str, list[int]]:
    """Size and modification time of source files: cheap, and enough to notice that one was replaced."""
    result = {}
    for path in paths:
        state = path.stat()
        result[path.name] = [state.st_size, state.st_mtime_ns]
    return result


@contextmanager
def working(target: Path, job: dict[str, Any], folders: tuple[str, ...]) -> Iterator[Path]:
    """The payload folder for *target*, new or from an interrupted run of the same *job*; locked.

    A run that fails before it has written anything takes the work folder that it has made away again.

    Raises:
        CommandError: the target exists or lies in the source, another run is at work, or the folder belongs to another
            job.
    """
    if os.path.lexists(target):  # a dangling link, too: the final rename could not replace it
        raise CommandError(f"{target} exists", hint="choose another name, or remove it first")
    source = Path(job["source"])
    if target.resolve().is_relative_to(source.resolve()):
        raise CommandError(
            f"{target} lies inside the source {source}, which is only read",
            hint="choose a destination elsewhere",
        )
    if not target.parent.is_dir():
        raise CommandError(
            f"{target.parent}: no such folder", hint=f"mkdir -p {shlex.quote(str(target.parent))}"
        )
    work = work_path(target)
    is_new = not work.exists()
    work.mkdir(exist_ok=True)
    with (work / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(
                f"{work}: another run is making {target}", hint="wait for it"
            ) from None
        _claim(target, {"layout": _LAYOUT, **job})
        payload = work / _PAYLOAD
        for folder in (payload, *(payload / folder for folder in folders)):
            folder.mkdir(exist_ok=True)
        try:
            yield payload
        except CommandError:
            if is_new and all(path.is_dir() for path in payload.rglob("*")):
                shutil.rmtree(work)
            raise


def finish(payload: Path, target: Path) -> None:
    """Give *payload* its final name and remove what was only for going on."""
    publish(payload, target)
    work = payload.parent
    with suppress(
        OSError
    ):  # the result is whole; what stays after a kill here, the next run takes over
        (work / _JOB).unlink()
        (work / _LOCK).unlink()
        work.rmdir()


def _claim(target: Path, job: dict[str, Any]) -> None:
    work = work_path(target)
    path = work / _JOB
    if {entry.name for entry in work.iterdir()} <= {_JOB, _LOCK, f".{_JOB}.tmp"}:
        write_json(path, job)  # nothing made yet, so whatever job was here has nothing to lose
        return
    try:
        before = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        before = None  # not this program's: it writes the job first
    if before != job:
        raise CommandError(
            f"{work} holds an unfinished run of other input or of an older convert-csf (or the source has changed since)",
            hint=f"run the command again after {remove_command(target)}",
        )
