# SPDX-License-Identifier: Apache-2.0
"""Reads once what a target holds at every path that matters; judging and planning are pure functions of it."""

from __future__ import annotations

from dataclasses import dataclass

from b12x_overlay.patching import manifest, recorded
from b12x_overlay.patching.entry import Entry, Found, Reader
from b12x_overlay.patching.patchset import MARKER, PatchSet
from b12x_overlay.patching.recorded import Recorded


@dataclass(frozen=True)
class Survey:
    """What stands where."""

    patch_set: PatchSet
    found: dict[str, Found]
    recorded: Recorded | None
    """The set that the marker names, if there is a readable marker."""
    version: str | None
    """The target's vLLM version, None where nothing says it (a git checkout)."""

    @property
    def marker(self) -> bytes:
        """The marker's bytes for this set."""
        return manifest.render(self.patch_set)

    @property
    def wrong_version(self) -> bool:
        """Whether the target says that it is another vLLM; a local suffix (+cu129) does not count."""
        return (
            self.version is not None
            and self.version.partition("+")[0] != self.patch_set.pin.version
        )

    def entry(self, path: str) -> Entry | None:
        """The file at *path*; None where there is none or it is not touched."""
        found = self.found.get(path)
        return found if isinstance(found, Entry) else None


def survey(reader: Reader, patch_set: PatchSet, version: str | None) -> Survey:
    """Read every touched, overlay and marker path of *patch_set* and of the recorded set."""
    marker = reader.read(MARKER)
    old = recorded.from_marker(marker)
    paths = [*patch_set.chains, *(file.path for file in patch_set.overlay)]
    if old is not None:
        paths += [*old.chains, *old.overlay]
    found = {path: reader.read(path) for path in dict.fromkeys(paths)}
    found[MARKER] = marker
    return Survey(patch_set, found, old, version)
