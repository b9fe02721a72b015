# SPDX-License-Identifier: Apache-2.0
"""Packs ``verify`` and ``doctor`` into one file each, which any Python 3.11+ runs by path.

Each is a zip archive with a ``__main__.py`` (what ``python -m zipapp`` makes), written so that the same sources give
the same bytes with every Python: stored, not compressed, with fixed times and modes.
"""

from __future__ import annotations

import io
import os
import zipfile
from errno import EEXIST
from pathlib import Path

from b12x_overlay.image.expected import NAME, Expected

PROGRAMS = {"verify": "b12x_overlay.image.verify", "doctor": "b12x_overlay.doctor.cli"}
"""Program -> module with its ``main``."""

_PACKAGE = Path(__file__).resolve().parents[1]
_MODULES = (
    "__init__.py",
    "console.py",
    "exitcodes.py",
    "doctor/*.py",
    "image/__init__.py",
    "image/expected.py",
    "image/integrity.py",
    "image/manifest.py",
    "image/verify.py",
)
_SHEBANG = b"#!/usr/bin/env python3\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = """# SPDX-License-Identifier: Apache-2.0
import sys

if sys.version_info < (3, 11):
    raise SystemExit("error: {name} needs Python 3.11 or newer, this is " + sys.version.split()[0])
from {module} import main

raise SystemExit(main())
"""


def build(name: str, expected: Expected) -> bytes:
    """The bytes of program *name*, for the patch set in *expected*."""
    files = {
        "__main__.py": _MAIN.format(name=name, module=PROGRAMS[name]).encode(),
        NAME: expected.to_json(),
    }
    for pattern in _MODULES:
        for path in _PACKAGE.glob(pattern):
            files[f"b12x_overlay/{path.relative_to(_PACKAGE).as_posix()}"] = path.read_bytes()
    stream = io.BytesIO()
    stream.write(_SHEBANG)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for member in sorted(files):
            info = zipfile.ZipInfo(member, _EPOCH)
            info.create_system = 3  # Unix, on every machine
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[member])
    return stream.getvalue()


def write(folder: Path, expected: Expected) -> dict[str, bytes]:
    """Write both programs, executable, into *folder*, each whole or not at all; returns their bytes.

    Raises:
        FileExistsError: something that is not an earlier version of the program has its name; nothing was written.
        OSError: *folder* cannot be written.
    """
    made = {name: build(name, expected) for name in PROGRAMS}
    for name in made:
        path = folder / name
        if path.is_symlink() or (path.exists() and not _ours(path, name)):
            raise FileExistsError(EEXIST, "not a program of this project", str(path))
    for name, data in made.items():
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        try:
            temporary.write_bytes(data)
            temporary.chmod(0o755)
            temporary.replace(folder / name)
        except OSError as error:  # write() itself names no file
            raise OSError(error.errno, error.strerror, str(folder / name)) from error
        finally:
            temporary.unlink(missing_ok=True)
    return made


def _ours(path: Path, name: str) -> bool:
    """Whether *path* is the program *name*, of whatever version."""
    try:
        with zipfile.ZipFile(path) as archive:
            return PROGRAMS[name].encode() in archive.read("__main__.py")
    except (OSError, KeyError, zipfile.BadZipFile):
        return False
