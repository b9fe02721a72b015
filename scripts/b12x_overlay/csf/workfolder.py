# SPDX-License-Identifier: Apache-2.0
"""The folder a run works in until its result is whole, so that a later run can go on where this one stopped.

It lies beside the destination as ``.<name>.partial`` (same file system, so that the final rename is atomic). Its
``job.json`` says what is being made of which source files; a run that finds another job there refuses.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.csf.files import publish, write_json

_JOB = "job.json"
_LOCK = ".lock"


def work_path(target: Path) -> Path:
    """Where a run that makes *target* works."""
    return target.with_name(f".{target.name}.partial")


def fingerprint(paths: list[Path]) -> dict[str, list[int]]:
    """Size and modification time of source files: cheap, and enough to notice that one was replaced."""
    result = {}
    for path in paths:
        state = path.stat()
        result[path.name] = [state.st_size, state.st_mtime_ns]
    return result


@contextmanager
def working(target: Path, job: dict[str, Any], folders: tuple[str, ...]) -> Iterator[Path]:
    """A locked work folder for *target*, new or from an interrupted run of the same *job*.

    A run that fails before it has written anything takes the folder that it has made away again.

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
        raise CommandError(f"{target.parent}: no such folder", hint=f"mkdir -p {target.parent}")
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
        _claim(work, job)
        for folder in folders:
            (work / folder).mkdir(exist_ok=True)
        try:
            yield work
        except CommandError:
            if is_new and _holds_nothing(work):
                shutil.rmtree(work)
            raise


def finish(work: Path, target: Path) -> None:
    """Remove what is only for going on, and give the folder its final name."""
    (work / _JOB).unlink()
    (work / _LOCK).unlink()
    publish(work, target)


def _holds_nothing(work: Path) -> bool:
    return all(path.is_dir() or path.name in (_JOB, _LOCK) for path in work.rglob("*"))


def _claim(work: Path, job: dict[str, Any]) -> None:
    path = work / _JOB
    try:
        before = json.loads(path.read_bytes())
    except FileNotFoundError:
        write_json(path, job)
        return
    except ValueError:
        before = None
    if before != job:
        raise CommandError(
            f"{work} holds an unfinished run of other input (or the source has changed since)",
            hint=f"rm -r {work}",
        )
