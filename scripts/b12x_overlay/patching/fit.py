# SPDX-License-Identifier: Apache-2.0
"""How a diff relates to bytes that it was not made for: exact, moved, absorbed or in conflict.

For reports only: ``apply`` never uses a position found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from b12x_overlay.patching.diff import FileDiff, Hunk, split_lines
from b12x_overlay.patching.hunks import places, show


class Fit(StrEnum):
    """Where a hunk stands in a file."""

    EXACT = "exact"
    MOVED = "moved"
    ABSORBED = "absorbed"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class HunkFit:
    """One hunk's relation to a file."""

    hunk: Hunk
    fit: Fit
    index: int
    """0-based position of the old side (exact, moved), of the new side (absorbed), of the best guess (conflict)."""
    line: int
    """1-based line to look at."""
    detail: str

    @property
    def offset(self) -> int:
        """How many lines the hunk moved."""
        return self.index - self.hunk.old_index


def fit_file(diff: FileDiff, data: bytes) -> list[HunkFit]:
    """Each hunk's relation to *data*."""
    lines = split_lines(data)
    return [_fit_hunk(lines, hunk) for hunk in diff.hunks]


def summary(fits: list[HunkFit]) -> Fit:
    """The file's relation: the worst of its hunks; part absorbed and part not is a conflict."""
    kinds = {fit.fit for fit in fits}
    if Fit.CONFLICT in kinds or (Fit.ABSORBED in kinds and len(kinds) > 1):
        return Fit.CONFLICT
    return next((kind for kind in (Fit.ABSORBED, Fit.MOVED) if kind in kinds), Fit.EXACT)


def carry(fits: list[HunkFit], data: bytes) -> bytes:
    """*data* with exact and moved hunks put in, for judging the next patch of a series."""
    lines = split_lines(data)
    for fit in sorted(fits, key=lambda one: one.index, reverse=True):
        if fit.fit in (Fit.EXACT, Fit.MOVED):
            lines[fit.index : fit.index + len(fit.hunk.old)] = fit.hunk.new
    return b"".join(lines)


def take_off(diff: FileDiff, data: bytes) -> bytes:
    """*data* without the hunks whose result stands there, for judging an earlier patch of a series."""
    lines = split_lines(data)
    for fit in sorted(fit_file(diff, data), key=lambda one: one.index, reverse=True):
        if fit.fit is Fit.ABSORBED:
            lines[fit.index : fit.index + len(fit.hunk.new)] = fit.hunk.old
    return b"".join(lines)


def _fit_hunk(lines: list[bytes], hunk: Hunk) -> HunkFit:
    old, new = tuple(hunk.old), tuple(hunk.new)
    there = places(lines, new)
    inside = {at for start in there for at in range(start, start + len(new))}
    sources = (
        [at for at in places(lines, old) if at not in inside]
        if old
        else [min(hunk.old_index, len(lines))]
    )
    if there and not sources:
        at = min(there, key=lambda place: abs(place - hunk.new_index))
        return HunkFit(hunk, Fit.ABSORBED, at, at + 1, f"its result is already at line {at + 1}")
    if there:
        return _conflict(
            hunk, there[0], f"both its result (line {there[0] + 1}) and its source are there"
        )
    if hunk.old_index in sources:
        return HunkFit(hunk, Fit.EXACT, hunk.old_index, hunk.old_start, "")
    if len(sources) == 1:
        at = sources[0]
        scope = _scope(lines, at)
        if (
            hunk.heading
            and scope
            and not scope.startswith(hunk.heading)
            and not hunk.heading.startswith(scope)
        ):
            found, wanted = (
                name.decode(errors="backslashreplace") for name in (scope, hunk.heading)
            )
            return _conflict(hunk, at, f"its lines stand under {found!r}, not {wanted!r}")
        return HunkFit(hunk, Fit.MOVED, at, at + 1, f"moved by {at - hunk.old_index:+d} lines")
    if sources:
        where = ", ".join(str(at + 1) for at in sources[:4])
        return _conflict(hunk, sources[0], f"its lines stand at several places ({where})")
    return _nearest(lines, hunk)


def _nearest(lines: list[bytes], hunk: Hunk) -> HunkFit:
    old = list(hunk.old)
    bare = [line.replace(b"\r\n", b"\n") for line in lines]
    if bare != lines and places(bare, tuple(line.replace(b"\r\n", b"\n") for line in old)):
        return _conflict(
            hunk, hunk.old_index, "line endings differ (CRLF where LF is wanted, or the reverse)"
        )

    def score(at: int) -> tuple[int, int]:
        same = sum(a == b for a, b in zip(old, lines[at : at + len(old)], strict=False))
        return same, -abs(at - hunk.old_index)

    best = max(range(max(len(lines), 1)), key=score)
    for offset, wanted in enumerate(old):
        found = lines[best + offset] if best + offset < len(lines) else b""
        if found != wanted:
            return _conflict(hunk, best + offset, f"wanted {show(wanted)}, found {show(found)}")
    return _conflict(hunk, best, "its lines are gone")


def _conflict(hunk: Hunk, at: int, detail: str) -> HunkFit:
    return HunkFit(hunk, Fit.CONFLICT, at, at + 1, detail)


def _scope(lines: list[bytes], at: int) -> bytes:
    """The line that git would print after ``@@``: the last one before *at* that starts with a letter, _ or $."""
    for line in reversed(lines[:at]):
        if line[:1].isalpha() or line[:1] in (b"_", b"$"):
            return line.strip()[:80]
    return b""
