# SPDX-License-Identifier: Apache-2.0
"""Files as the engine sees them: bytes with an executable bit, and changes from one to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from b12x_overlay.patching.patchset import sha256


@dataclass(frozen=True)
class Entry:
    """A plain file's content."""

    data: bytes
    executable: bool = False

    @cached_property
    def sha256(self) -> str:
        """Digest of the bytes."""
        return sha256(self.data)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Something at a path that the engine does not touch: a symbolic link, a folder, an unreadable file."""

    reason: str
    detail: str


Found = Entry | Blocked | None
"""What stands at a path; None for nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """One path's old and new content; None for absent."""

    path: str
    old: Entry | None
    new: Entry | None


class Reader(Protocol):
    """Whatever holds vLLM's files: a folder or a wheel."""

    def read(self, path: str) -> Found:
        """What stands at *path* (relative, below the tree)."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryReader:
    """Files in a dict, for planning ahead of writing."""

    files: Mapping[str, Entry]

    def read(self, path: str) -> Found:
        """The entry, or None."""
        return self.files.get(path)
