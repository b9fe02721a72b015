# SPDX-License-Identifier: Apache-2.0
"""RECORD, the list of an installed package's files: rows of changed files are rewritten, all others kept as they are.

Rows of touched files change in place, rows of files that the set adds stand at the end in the order of their names,
and both are undone by the same function on revert, so that RECORD returns to its original bytes. Rows of compiled
files have no hash and stay.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Mapping

from b12x_overlay.patching.diff import split_lines
from b12x_overlay.patching.entry import Entry


def row_hash(data: bytes) -> str:
    """A file's digest as RECORD writes it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def update(record: bytes, files: Mapping[str, Entry | None], added: Collection[str] = ()) -> bytes:
    """*record* with the rows of *files* as their bytes want them; None removes a row; *added* go to the end."""
    lines = split_lines(record)
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    wanted = _encoded(files)
    out: list[bytes] = []
    seen: set[str] = set()
    for line in lines:
        fields = _fields_of(line, wanted)
        path = fields[0]
        if path not in files:
            out.append(line)
        elif (entry := files[path]) is not None and path not in added:
            seen.add(path)
            out.append(_row(path, entry, end) if fields[1:2] != [""] else line)
    if out and not out[-1].endswith(b"\n"):
        out[-1] += end
    out += [
        _row(path, entry, end)
        for path, entry in sorted(files.items())
        if entry is not None and path not in seen
    ]
    return b"".join(out)


def wrong_rows(record: bytes, files: Mapping[str, Entry | None]) -> list[str]:
    """Paths whose row is missing, has another hash or size, or is there although the file is not."""
    wanted = _encoded(files)
    found = (_fields_of(line, wanted) for line in split_lines(record))
    rows = {fields[0]: fields[1:] for fields in found if fields[0] in files}
    bad = []
    for path, entry in files.items():
        row = rows.get(path)
        if entry is None:
            if row is not None:
                bad.append(path)
        elif row is None or (row[0] and row != [row_hash(entry.data), str(len(entry.data))]):
            bad.append(path)
    return bad


def rename(record: bytes, old: str, new: str) -> bytes:
    """*record* with the folder *old* of every path called *new* (a wheel's dist-info)."""
    out = []
    for line in split_lines(record):
        fields = _fields(line)
        if fields[0].startswith(f"{old}/"):
            fields[0] = new + fields[0][len(old) :]
            line = _line(fields, b"\r\n" if line.endswith(b"\r\n") else b"\n")
        out.append(line)
    return b"".join(out)


def paths(record: bytes) -> Iterable[str]:
    """All listed paths."""
    return (fields[0] for fields in map(_fields, split_lines(record)))


def _row(path: str, entry: Entry, end: bytes) -> bytes:
    return _line([path, row_hash(entry.data), str(len(entry.data))], end)


def _line(fields: list[str], end: bytes) -> bytes:
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue().encode("utf-8", "surrogateescape") + end


def _encoded(files: Iterable[str]) -> frozenset[bytes]:
    return frozenset(path.encode("utf-8", "surrogateescape") for path in files)


def _fields_of(line: bytes, wanted: frozenset[bytes]) -> list[str]:
    """The fields of a row that may be one of *wanted*; for the thousands of others a quick [""]."""
    return _fields(line) if line[:1] == b'"' or line.partition(b",")[0] in wanted else [""]


def _fields(line: bytes) -> list[str]:
    import csv

    text = line.decode("utf-8", "surrogateescape").rstrip("\r\n")

    return next(csv.reader([text]), [""])
