# SPDX-License-Identifier: Apache-2.0
"""Describes a conflict: each file with its line, what both sides have, and what kind of clash it is."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from b12x_overlay.git import Git

_KINDS = {
    # stages present: 1 the common ancestor, 2 beta's side, 3 canonical's
    (1, 2, 3): "both changed it",
    (2, 3): "both added it",
    (1, 2): "canonical deleted or moved it, beta changed it",
    (1, 3): "beta deleted or moved it, canonical changed it",
    (1,): "both moved it",
    (2,): "moved to on beta's side",
    (3,): "moved to on canonical's side",
}
_OURS = re.compile(rb"^<{7} HEAD(?::.*)?\r?$")
_THEIRS = re.compile(rb"^>{7} [0-9a-f]{7,64}\b.*\r?$")
_MIDDLE = re.compile(rb"^={7}\r?$")


@dataclass(frozen=True)
class Clash:
    """One place: *line* of the file in the work tree (0: the whole file), and both sides' lines."""

    path: str
    line: int
    kind: str
    beta: tuple[str, ...]
    canonical: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_clashes(work: Git) -> list[Clash]:
    """Every clash of the stopped pick."""
    stages: dict[str, dict[int, str]] = {}
    for entry in work.fields("ls-files", "-u", "-z"):
        meta, _, path = entry.partition("\t")
        _, blob, stage = meta.split(" ")
        stages.setdefault(path, {})[int(stage)] = blob
    clashes: list[Clash] = []
    for path, found in sorted(stages.items()):
        kind = _KINDS.get(tuple(sorted(found)), "unmerged")
        file = work.folder / path
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        places = marked_places(data)
        if {2, 3} <= set(found) and not places:
            kind += ", and it cannot be merged as text (binary, link or mode)"
        clashes += [Clash(path, line, kind, ours, theirs) for line, ours, theirs in places]
        if not places:
            clashes.append(
                Clash(path, 0, kind, _side(work, found.get(2)), _side(work, found.get(3)))
            )
    return clashes


def marked_places(data: bytes) -> list[tuple[int, tuple[str, ...], tuple[str, ...]]]:
    """The places between this pick's conflict markers: line number (from 1), beta's lines, canonical's lines."""
    places: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = []
    start, sides = 0, ([], [])  # type: tuple[int, tuple[list[str], list[str]]]
    side = 0
    for number, line in enumerate(data.split(b"\n"), 1):
        if _OURS.match(line):
            start, sides, side = number, ([], []), 0
        elif start and side == 0 and _MIDDLE.match(line):
            side = 1
        elif start and _THEIRS.match(line):
            places.append((start, tuple(sides[0]), tuple(sides[1])))
            start = 0
        elif start:
            sides[side].append(line.decode("utf-8", "replace"))
    return places


def _side(work: Git, blob: str | None) -> tuple[str, ...]:
    if blob is None:
        return ("(not there)",)
    data = work.run("cat-file", "-p", blob).out
    if b"\0" in data:
        return (f"(binary, {len(data)} bytes)",)
    return tuple(data.decode("utf-8", "replace").split("\n")[:20])
