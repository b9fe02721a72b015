# SPDX-License-Identifier: Apache-2.0
"""Unpacks the pinned source distribution: plain files and folders below one top folder, nothing else."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.patching.diff import safe_path


def unpack(archive: Path, destination: Path) -> None:
    """Put the archive's top folder at *destination*, which must not exist; it appears whole or not at all.

    Raises:
        CommandError: a link, a device, a path outside the top folder; several top folders.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        top = ""
        with tarfile.open(archive, "r|gz") as tar:
            for member in tar:
                name = member.name.rstrip("/")
                first = _checked(archive, name).partition("/")[0]
                if top and first != top:
                    raise CommandError(
                        f"{archive} has more than one top folder: {top} and {first}",
                        reason="archive",
                    )
                top = first
                _extract(archive, tar, member, work / name)
        (work / top).rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _extract(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    source = tar.extractfile(member) if member.isreg() else None
    if source is None:
        raise CommandError(
            f"{archive}: {member.name} is a link or a special file; refused", reason="archive"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _checked(archive: Path, name: str) -> str:
    try:
        return safe_path(name)
    except ValueError as error:
        raise CommandError(f"{archive}: {error}; refused", reason="archive") from error
