# SPDX-License-Identifier: Apache-2.0
"""Applies hunks at the positions they name, or not at all; finds where a hunk would fit for reports only."""

from __future__ import annotations

from b12x_overlay.patching.diff import FileDiff, Hunk, split_lines


class HunkError(Exception):
    """A hunk does not fit where it says; ``line`` is 1-based in the target file."""

    def __init__(self, path: str, line: int, wanted: bytes, found: bytes, hunk: Hunk) -> None:
        super().__init__(path, line)
        self.path = path
        self.line = line
        self.wanted = wanted
        self.found = found
        self.hunk = hunk

    def __str__(self) -> str:
        note = ""
        if self.wanted.replace(b"\r\n", b"\n") == self.found.replace(b"\r\n", b"\n"):
            note = " (line endings differ)"
        return (
            f"{self.path}:{self.line}: wanted {show(self.wanted)}, found {show(self.found)}{note}"
        )


def show(line: bytes) -> str:
    """A line for a message: readable, with unusual bytes escaped and a missing line named."""
    if not line:
        return "end of file"
    text = line.removesuffix(b"\n")
    suffix = "" if line.endswith(b"\n") else " without line end"
    return f"{text.decode('utf-8', errors='backslashreplace')!r}{suffix}"


def apply(diff: FileDiff, data: bytes) -> bytes:
    """The bytes after *diff*.

    Raises:
        HunkError: a hunk's old side is not exactly at its position.
    """
    return _run(diff, data, reverse=False)


def reverse(diff: FileDiff, data: bytes) -> bytes:
    """The bytes before *diff*, given the bytes after it.

    Raises:
        HunkError: a hunk's new side is not exactly at its position.
    """
    return _run(diff, data, reverse=True)


def _run(diff: FileDiff, data: bytes, *, reverse: bool) -> bytes:
    lines = split_lines(data)
    out: list[bytes] = []
    at = 0
    for hunk in diff.hunks:
        source, result = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        start = hunk.new_index if reverse else hunk.old_index
        _check(diff.path, lines, start, source, hunk)
        out += lines[at:start]
        out += result
        at = start + len(source)
        bare = bool(result) and not result[-1].endswith(b"\n")
        if at < len(lines) and (bare or not hunk.ends_in_context):
            # git's rule too: a hunk without trailing context belongs to the end of the file
            raise HunkError(diff.path, at + 1, b"", lines[at], hunk)
    out += lines[at:]
    return b"".join(out)


def _check(
    path: str, lines: list[bytes], start: int, wanted: tuple[bytes, ...], hunk: Hunk
) -> None:
    for offset, line in enumerate(wanted):
        found = lines[start + offset] if start + offset < len(lines) else b""
        if found != line:
            raise HunkError(path, start + offset + 1, line, found, hunk)
    if start > len(lines):
        raise HunkError(path, len(lines) + 1, wanted[0] if wanted else b"", b"", hunk)


def places(lines: list[bytes], block: tuple[bytes, ...]) -> list[int]:
    """0-based positions at which *block* stands in *lines*; none for an empty block."""
    if not block:
        return []
    first, size = block[0], len(block)
    wanted = list(block)
    return [i for i, line in enumerate(lines) if line == first and lines[i : i + size] == wanted]
