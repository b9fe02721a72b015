# SPDX-License-Identifier: Apache-2.0
"""Packs ``verify`` and ``doctor`` into one file each, which any Python 3.11+ runs by path.

Each is a zip archive with a ``__main__.py`` (what ``python -m zipapp`` makes), written so that the same sources give
the same bytes with every Python: stored, not compressed, with fixed times and modes.
"""

from __future__ import annotations

import io
import zipfile
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
    """Write both programs, executable, into *folder*; returns their bytes."""
    made = {name: build(name, expected) for name in PROGRAMS}
    for name, data in made.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o755)
    return made
