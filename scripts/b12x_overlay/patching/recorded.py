# SPDX-License-Identifier: Apache-2.0
"""The set that a tree's marker module records, so that another version of this project's set can be taken off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from b12x_overlay.patching import manifest
from b12x_overlay.patching.diff import PatchFormatError, parse, safe_path
from b12x_overlay.patching.entry import Entry, Found
from b12x_overlay.patching.patchset import MARKER, Chain, Step, sha256


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a marker says: never believed about a file's state, only used to derive bytes that are then checked."""

    patchset: str
    version: str
    chains: dict[str, Chain]
    overlay: dict[str, str]
    """Overlay files with their sha256."""
    patches: dict[str, str]
    """Patch names with the sha256 of their files."""


def from_marker(found: Found) -> Recorded | None:
    """The recorded set, or None where there is no marker or it is damaged."""
    if not isinstance(found, Entry):
        return None
    document = manifest.read(found.data)
    if document is None:
        return None
    try:
        return _recorded(document)
    except (KeyError, TypeError, ValueError, StopIteration, PatchFormatError):
        return None


def is_ours(entry: Entry) -> bool:
    """Whether *entry* is a marker that this project wrote, be it damaged below its first lines."""
    return entry.data.startswith(manifest.FIRST_LINES)


def _recorded(document: dict[str, Any]) -> Recorded:
    chains: dict[str, list[Step]] = {}
    overlay: dict[str, str] = {}
    texts = manifest.series(document)
    for patch in document["patches"]:
        diffs = {diff.path: diff for diff in parse(texts[patch["name"]])}
        for file in patch["files"]:
            step = Step(patch["name"], str(file["before"]), str(file["after"]), diffs[file["path"]])
            chains.setdefault(safe_path(file["path"]), []).append(step)
        for file in patch["overlay"]:
            overlay[_inside(file["path"])] = str(file["sha256"])
    return Recorded(
        str(document["patchset"]),
        str(document["pin"]["version"]),
        {_inside(path): tuple(chain) for path, chain in chains.items()},
        overlay,
        {name: sha256(text) for name, text in texts.items()},
    )


def _inside(path: str) -> str:
    if not safe_path(path).startswith("vllm/") or path == MARKER:
        raise ValueError(path)
    return path
