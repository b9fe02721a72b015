# SPDX-License-Identifier: Apache-2.0
"""Compiled copies of modules: removed when their source changes, so that no process runs the old code.

Python compares only the source's mtime (whole seconds) and size, and nothing at all for unchecked-hash files, so an
edit of the same length within a second would go unseen.
"""

from __future__ import annotations

import glob
import importlib.util
import struct
from collections.abc import Iterable
from pathlib import Path

_HEADER = struct.Struct("<4sIII")


def compiled(source: Path) -> list[Path]:
    """All compiled copies of *source*, of any Python version and optimisation level."""
    if source.suffix != ".py":
        return []
    folder = source.parent / "__pycache__"
    if folder.is_symlink():
        return []
    return sorted(folder.glob(f"{glob.escape(source.stem)}.*.pyc"))


def remove(sources: Iterable[Path]) -> None:
    """Remove the compiled copies of *sources*, and their ``__pycache__`` folders where nothing else is in them."""
    folders = set()
    for source in sources:
        for path in compiled(source):
            path.unlink(missing_ok=True)
        folders.add(source.parent / "__pycache__")
    for folder in folders:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def stale(source: Path) -> list[Path]:
    """Compiled copies that Python would run although they were made from other bytes.

    Only hash-based files can be judged; those with a time stamp are checked by Python itself.
    """
    found = []
    for path in compiled(source):
        head = path.read_bytes()[: _HEADER.size]
        if len(head) < _HEADER.size:
            continue
        _, flags, low, high = _HEADER.unpack(head)
        if flags == 0b01:
            wanted = importlib.util.source_hash(source.read_bytes())
            if struct.pack("<II", low, high) != wanted:
                found.append(path)
    return found
