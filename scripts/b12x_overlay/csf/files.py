# SPDX-License-Identifier: Apache-2.0
"""Writing so that a crash, Ctrl-C or a full disk leaves either the whole file or none."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from b12x_overlay.console import CommandError
from b12x_overlay.csf.core import readable
from b12x_overlay.exitcodes import ExitCode

BLOCK = 8 << 20


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a contiguous array, for files and hashes, without a copy."""
    return array.reshape(-1).data.cast("B") if array.size else memoryview(b"")


class HashingWriter:
    """Writes to a file and hashes on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self._file.write(block)
            self._hash.update(block)
        self.nbytes += len(view)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[HashingWriter]:
    """Write *path* under a temporary name beside it; it gets its name, on disk for good, when the block ends well."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield HashingWriter(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, document: Any) -> None:
    """Write *document* as indented JSON, whole or not at all."""
    with whole_file(path) as out:
        out.write(json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_whole(source: Path, target: Path) -> str:
    """Copy a file by content (links are followed) and return its SHA-256."""
    with source.open("rb") as file, whole_file(target) as out:
        while block := file.read(BLOCK):
            out.write(block)
        return out.sha256


@contextmanager
def explain_disk(work: Path, again: str) -> Iterator[None]:
    """Turn 'no space left' into an error that says what stays and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(work).free if work.exists() else 0
        raise CommandError(
            f"{work}: the disk is full ({readable(free)} free); finished shards are kept there",
            code=ExitCode.FAILED,
            reason="disk-full",
            hint=again,
        ) from error


def refuse_small_disk(folder: Path, needed: int) -> None:
    """Refuse before writing anything if *needed* bytes cannot fit."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CommandError(
            f"{folder}: {readable(free)} free, about {readable(needed)} needed",
            reason="disk-full",
            hint="free space or choose another destination, then run the command again",
        )


def publish(work: Path, target: Path) -> None:
    """Give the finished folder *work* its final name, which must not exist."""
    for folder in (work, *(path for path in work.iterdir() if path.is_dir())):
        _sync_folder(folder)
    if target.exists():
        raise CommandError(f"{target} appeared meanwhile; the finished result is {work}")
    work.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
