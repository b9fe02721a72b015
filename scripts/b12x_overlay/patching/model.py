# SPDX-License-Identifier: Apache-2.0
"""What a patch set is made of; ``patchset.load`` reads one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from b12x_overlay.patching.diff import FileDiff

MARKER = "vllm/b12x_patchset.py"
"""The generated module that says which set a vLLM carries; no patch or overlay file may have its path."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A pinned download."""

    filename: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Pin:
    """The one vLLM that this set is for."""

    version: str
    commit: str
    sdist: Artifact
    wheels: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True)
class TouchedFile:
    """A file that a patch changes, with the sha256 of its bytes before and after."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Step:
    """One link of a file's chain: a patch's diff with the sha256 on both sides."""

    patch: str
    before: str
    after: str
    diff: FileDiff


Chain = tuple[Step, ...]
"""What happens to one file, in the patches' order."""


@dataclass(frozen=True, slots=True)
class OverlayFile:
    """A file that the set adds to vLLM."""

    path: str
    """Where it lands, relative to the tree (vllm/…)."""
    source: Path
    data: bytes
    sha256: str
    executable: bool


@dataclass(frozen=True)
class Patch:
    """One ``[[patch]]``: its texts, its diff, its files."""

    name: str
    what: str
    why: str
    until: str
    fragments: tuple[str, ...]
    claims: tuple[str, ...]
    """Overlay files and folders as listed."""
    files: tuple[TouchedFile, ...]
    data: bytes
    """The patch file's bytes."""
    diffs: tuple[FileDiff, ...]
    overlay: tuple[OverlayFile, ...]

    @cached_property
    def sha256(self) -> str:
        """Digest of the patch file."""
        return sha256(self.data)

    @cached_property
    def added(self) -> int:
        """Upstream lines added."""
        return sum(diff.added for diff in self.diffs)

    @cached_property
    def removed(self) -> int:
        """Upstream lines removed."""
        return sum(diff.removed for diff in self.diffs)

    def diff_of(self, path: str) -> FileDiff:
        """This patch's diff of *path*."""
        return next(diff for diff in self.diffs if diff.path == path)


@dataclass(frozen=True, eq=False)
class PatchSet:
    """Everything that patches/ and overlay/ say, in order. Compared and hashed by identity: it is loaded once."""

    revision: int
    """N of the wheels' local version ``+b12x.N``."""
    pin: Pin
    patches: tuple[Patch, ...]
    unclaimed: tuple[str, ...] = ()
    """Files below overlay/ that no patch brings; they are not applied."""
    chains: dict[str, Chain] = field(init=False, repr=False)
    """Per touched path its chain."""

    def __post_init__(self) -> None:
        chains: dict[str, list[Step]] = {}
        for patch in self.patches:
            for file in patch.files:
                step = Step(patch.name, file.before, file.after, patch.diff_of(file.path))
                chains.setdefault(file.path, []).append(step)
        object.__setattr__(self, "chains", {path: tuple(chain) for path, chain in chains.items()})

    @property
    def overlay(self) -> tuple[OverlayFile, ...]:
        """All overlay files, in the patches' order."""
        return tuple(file for patch in self.patches for file in patch.overlay)

    def patch(self, name: str) -> Patch:
        """The patch called *name*."""
        return next(patch for patch in self.patches if patch.name == name)


def sha256(data: bytes) -> str:
    """Hex digest of *data*."""
    return hashlib.sha256(data).hexdigest()
