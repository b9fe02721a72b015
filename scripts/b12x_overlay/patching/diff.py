# SPDX-License-Identifier: Apache-2.0
"""Reads unified diffs (git's and plain ones) without changing a byte.

Lines end at LF only, so that CR, form feed, NEL and U+2028 inside a line stay what they are, and nothing is
decoded. What this project's patches never need (binary, rename, copy) is refused by name rather than guessed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: (.*))?\n?$")
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_UNSUPPORTED = (
    b"GIT binary patch",
    b"Binary files ",
    b"rename from ",
    b"rename to ",
    b"copy from ",
    b"copy to ",
)
_NO_NEWLINE = b"\\ "


class PatchFormatError(ValueError):
    """The patch text itself is wrong: corrupt, truncated, or of a kind that is not supported."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk. ``old`` and ``new`` are its two sides as whole lines, line ends included."""

    old_start: int
    """1-based first line of the old side; with an empty old side, the line after which to insert."""
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    added: int
    removed: int
    ends_in_context: bool
    """Whether the last line is context; if not, git takes the hunk to end the file, and so does this engine."""
    heading: bytes
    """The text after the second ``@@``: by git's rule the enclosing class or function."""
    line: int
    """Where the hunk starts in the patch file, for messages."""

    @property
    def old_index(self) -> int:
        """0-based position of the old side."""
        return self.old_start - 1 if self.old else self.old_start

    @property
    def new_index(self) -> int:
        """0-based position of the new side."""
        return self.new_start - 1 if self.new else self.new_start


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What one patch does to one file."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False
    old_executable: bool | None = None
    new_executable: bool | None = None
    """Executable bit before and after where the patch changes or sets it, else None."""

    @property
    def added(self) -> int:
        """Number of added lines."""
        return sum(hunk.added for hunk in self.hunks)

    @property
    def removed(self) -> int:
        """Number of removed lines."""
        return sum(hunk.removed for hunk in self.hunks)


def split_lines(data: bytes) -> list[bytes]:
    """Lines of *data* with their ends, split at LF only; the last one may lack it."""
    lines = data.split(b"\n")
    last = lines.pop()
    result = [line + b"\n" for line in lines]
    if last:
        result.append(last)
    return result


@cache
def safe_path(name: str) -> str:
    """*name* if it is a plain relative path below the tree.

    Raises:
        ValueError: absolute, empty, with ``..``, a backslash or NUL, or inside a ``.git`` folder.
    """
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not a plain relative path")
    if any(part.lower() == ".git" for part in parts):
        raise ValueError(f"{name!r} is inside a git folder")
    return name


def parse(data: bytes) -> tuple[FileDiff, ...]:
    """All file diffs of a patch; text before, between and after them (a mail header, say) is passed over.

    Raises:
        PatchFormatError: the text is corrupt or truncated, was converted to CRLF, names a path outside the tree,
            names a file twice, or holds no diff at all.
    """
    return _Parser(split_lines(data)).parse()


class _Parser:
    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.at = 0

    def parse(self) -> tuple[FileDiff, ...]:
        files: list[FileDiff] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith(b"diff --git "):
                files.append(self._git_file())
            elif line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                files.append(self._plain_file())
            elif _HUNK.match(line):
                raise self._error("a hunk without a file header before it: the patch is corrupt")
            else:
                self.at += 1
        if not files:
            raise PatchFormatError(
                1, "no diff found: the patch is empty, truncated or not a unified diff"
            )
        seen: set[str] = set()
        for diff in files:
            if diff.path in seen:
                raise PatchFormatError(
                    1, f"{diff.path} appears twice; merge its hunks into one file diff"
                )
            seen.add(diff.path)
        return tuple(files)

    def _git_file(self) -> FileDiff:
        start = self.at
        names = self._chomp(self.lines[self.at])[len(b"diff --git ") :]
        old_mode = new_mode = None
        creates = deletes = False
        self.at += 1
        while self.at < len(self.lines):
            line = self._chomp(self.lines[self.at])
            if line.startswith(_UNSUPPORTED):
                raise self._error(
                    f"{line.decode(errors='replace')!r}: binary, rename and copy are not supported"
                )
            if line.startswith(b"old mode "):
                old_mode = self._mode(line, b"old mode ")
            elif line.startswith(b"new mode "):
                new_mode = self._mode(line, b"new mode ")
            elif line.startswith(b"new file mode "):
                creates, new_mode = True, self._mode(line, b"new file mode ")
            elif line.startswith(b"deleted file mode "):
                deletes, old_mode = True, self._mode(line, b"deleted file mode ")
            elif not line.startswith((b"index ", b"similarity ", b"dissimilarity ")):
                break
            self.at += 1
        if self._peek(0).startswith(b"--- "):
            diff = self._plain_file(git=True)
            if diff.creates != creates or diff.deletes != deletes:
                raise PatchFormatError(
                    start + 1, "mode lines and /dev/null disagree: the patch is corrupt"
                )
            path, hunks = diff.path, diff.hunks
        else:
            path, hunks = self._same_name(names), ()
            if old_mode is None and new_mode is None:
                raise PatchFormatError(
                    start + 1, f"nothing is changed in {path}: the patch is corrupt or truncated"
                )
        if not (creates or deletes) and (old_mode is None) != (new_mode is None):
            raise PatchFormatError(
                start + 1, "only one of old mode and new mode: the patch is corrupt"
            )
        return FileDiff(path, hunks, creates, deletes, old_mode, new_mode)

    def _plain_file(self, *, git: bool = False) -> FileDiff:
        old = self._name(self.lines[self.at], b"--- ")
        self.at += 1
        if not self._peek(0).startswith(b"+++ "):
            raise self._error("'+++' expected after '---': the patch is corrupt or truncated")
        new = self._name(self.lines[self.at], b"+++ ")
        self.at += 1
        if old is None and new is None:
            raise self._error("both names are /dev/null: the patch is corrupt")
        if old is not None and new is not None and old != new:
            raise self._error(f"{old} becomes {new}: renames are not supported")
        hunks: list[Hunk] = []
        while match := _HUNK.match(self._peek(0)):
            hunks.append(self._hunk(match))
        if not hunks:
            raise self._error(
                "a hunk (@@ -l,n +l,n @@) expected: the patch is corrupt or truncated"
            )
        self._check_after_hunk()
        self._check_order(hunks)
        path = new if new is not None else old
        assert path is not None
        return FileDiff(path, tuple(hunks), creates=old is None, deletes=new is None)

    def _hunk(self, match: re.Match[bytes]) -> Hunk:
        start = self.at
        want_old = 1 if match[2] is None else int(match[2])
        want_new = 1 if match[4] is None else int(match[4])
        old: list[bytes] = []
        new: list[bytes] = []
        added = removed = 0
        last = b""
        self.at += 1
        while len(old) < want_old or len(new) < want_new:
            line = self._peek(0)
            kind, text = line[:1], line[1:]
            if line in (
                b"\n",
                b"\r\n",
            ):  # an editor took the blank away; git reads it as empty context too
                kind, text = b" ", line
            if not line or kind not in (b" ", b"+", b"-") or not text.endswith(b"\n"):
                raise self._error(
                    f"the hunk of line {start + 1} wants {want_old} old and {want_new} new lines, found {len(old)} "
                    f"and {len(new)}: the patch is corrupt or truncated"
                )
            bare = self._peek(1).startswith(_NO_NEWLINE)
            text = text[:-1] if bare else text
            if kind in (b" ", b"-"):
                old.append(text)
            if kind in (b" ", b"+"):
                new.append(text)
            added += kind == b"+"
            removed += kind == b"-"
            last = kind
            self.at += 2 if bare else 1
        if len(old) != want_old or len(new) != want_new:
            raise PatchFormatError(
                start + 1, "the hunk's line counts do not fit its lines: the patch is corrupt"
            )
        if any(not text.endswith(b"\n") for text in [*old[:-1], *new[:-1]]):
            raise PatchFormatError(
                start + 1, "a line without line end is not the last one: the patch is corrupt"
            )
        if not added and not removed:
            raise PatchFormatError(start + 1, "the hunk changes nothing: the patch is corrupt")
        return Hunk(
            int(match[1]), int(match[3]), tuple(old), tuple(new), added, removed, last == b" ",
            (match[5] or b"").strip(), start + 1,
        )  # fmt: skip

    def _check_after_hunk(self) -> None:
        line = self._peek(0)
        if line[:1] in (b"+", b" ") or (
            line[:1] == b"-" and line != b"-- \n" and not line.startswith(b"--- ")
        ):
            raise self._error("more lines than the hunk's counts say: the patch is corrupt")

    def _check_order(self, hunks: list[Hunk]) -> None:
        end = delta = 0
        for hunk in hunks:
            if hunk.old_index < end or hunk.new_index != hunk.old_index + delta:
                raise PatchFormatError(
                    hunk.line, "the hunks' positions contradict each other: the patch is corrupt"
                )
            end = hunk.old_index + len(hunk.old)
            delta += len(hunk.new) - len(hunk.old)

    def _name(self, line: bytes, prefix: bytes) -> str | None:
        raw = self._chomp(line)[len(prefix) :].split(b"\t")[0]
        if raw == b"/dev/null":
            return None
        return self._strip(_unquote(raw))

    def _same_name(self, names: bytes) -> str:
        half = len(names) // 2
        first, second = (
            self._strip(_unquote(names[:half])),
            self._strip(_unquote(names[half + 1 :])),
        )
        if names[half : half + 1] != b" " or first != second:
            raise self._error(f"cannot read the file name in {names.decode(errors='replace')!r}")
        return first

    def _strip(self, name: str) -> str:
        try:
            return safe_path(name.partition("/")[2])
        except ValueError as error:
            raise self._error(f"{error} (after taking a/ or b/ away)") from error

    def _mode(self, line: bytes, prefix: bytes) -> bool:
        mode = line[len(prefix) :]
        if mode not in (b"100644", b"100755"):
            raise self._error(
                f"mode {mode.decode(errors='replace')}: only plain files are supported"
            )
        return mode == b"100755"

    def _chomp(self, line: bytes) -> bytes:
        if line.endswith(b"\r\n"):
            raise self._error(
                "line endings: the patch's own header lines end in CRLF; restore its LF line endings"
            )
        return line.removesuffix(b"\n")

    def _peek(self, offset: int) -> bytes:
        index = self.at + offset
        return self.lines[index] if index < len(self.lines) else b""

    def _error(self, message: str) -> PatchFormatError:
        return PatchFormatError(min(self.at + 1, max(len(self.lines), 1)), message)


def _unquote(raw: bytes) -> str:
    """Undo git's C-style quoting of unusual file names."""
    if not (raw.startswith(b'"') and raw.endswith(b'"') and len(raw) > 1):
        return os.fsdecode(raw)
    body = raw[1:-1].decode("latin-1")
    out = bytearray()
    at = 0
    while at < len(body):
        if body[at] != "\\":
            out.append(ord(body[at]))
            at += 1
        elif body[at + 1 : at + 2] in _ESCAPES:
            out.append(_ESCAPES[body[at + 1]])
            at += 2
        else:
            try:
                out.append(int(body[at + 1 : at + 4], 8))
            except ValueError as error:
                raise PatchFormatError(1, f"bad quoting in file name {body!r}") from error
            at += 4
    return os.fsdecode(bytes(out))
