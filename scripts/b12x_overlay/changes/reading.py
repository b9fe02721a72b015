# SPDX-License-Identifier: Apache-2.0
"""Reads the fragment folder: what lies in it, and each file's JSON with nothing silently dropped."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from b12x_overlay.changes.model import Entry, Fault, Fragment
from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode


def read_folder(folder: Path) -> list[Entry]:
    """Everything in *folder*, sorted by name, links not followed.

    Raises:
        CommandError: there is no such folder.
        OSError: it cannot be listed or a file in it cannot be read.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise CommandError(
            f"{folder} {what}; wanted the folder that holds the fragments",
            code=ExitCode.USAGE, reason="no-folder", hint="name it with --folder, for example --folder .lil/changes",
        )  # fmt: skip
    return [_entry(path) for path in sorted(folder.iterdir(), key=lambda path: path.name)]


def _entry(path: Path) -> Entry:
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return Entry(path.name, path.read_bytes())
    kinds = {stat.S_IFLNK: "symbolic link", stat.S_IFDIR: "folder"}
    return Entry(path.name, None, kinds.get(stat.S_IFMT(mode), "special file"))


def parse_entries(entries: list[Entry]) -> tuple[list[Fragment], list[Fault]]:
    """Split *entries* into fragments (JSON objects) and the faults of those that are none."""
    fragments: list[Fragment] = []
    faults: list[Fault] = []
    for entry in entries:
        fault = _not_a_fragment(entry)
        if fault is None:
            assert entry.data is not None
            value, found = parse_object(entry.name, entry.data)
            faults += found
            if value is not None:
                fragments.append(Fragment(entry.name, entry.data, value))
        else:
            faults.append(fault)
    return fragments, faults


def _not_a_fragment(entry: Entry) -> Fault | None:
    if entry.data is None:
        return Fault(
            entry.name,
            "",
            f"is a {entry.kind}",
            "move it elsewhere: the folder holds fragments only",
            "not-a-file",
        )
    if not entry.name.endswith(".json") or entry.name.startswith("."):
        return Fault(
            entry.name, "", "is not a fragment: the name is not <id>.json",
            "name it <id>.json if it is one, else move it elsewhere: the folder holds fragments only", "file-name",
        )  # fmt: skip
    return None


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys came twice."""

    repeated: tuple[str, ...] = ()


def parse_object(file: str, data: bytes) -> tuple[dict[str, Any] | None, list[Fault]]:
    """Parse *data* strictly: UTF-8 without byte order mark, LF, no duplicate key, no NaN, an object."""
    faults: list[Fault] = []
    if data.startswith(b"\xef\xbb\xbf"):
        faults.append(
            Fault(
                file,
                "",
                "starts with a byte order mark",
                "save it as UTF-8 without one",
                "encoding",
            )
        )
        data = data[3:]
    if b"\r" in data:
        faults.append(
            Fault(file, "", "has CR line endings", "save it with LF line endings: fragments are compared by bytes",
                  "line-endings")
        )  # fmt: skip
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        what = f"line {line}: byte 0x{data[error.start]:02x} is not UTF-8"
        return None, [*faults, Fault(file, "", what, "save it as UTF-8", "encoding")]
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        what = f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        return None, [*faults, Fault(file, "", what, "correct the syntax there", "syntax")]
    except (ValueError, RecursionError) as error:
        what = f"not a fragment's JSON: {error}"
        return None, [
            *faults,
            Fault(file, "", what, "write plain texts, numbers and lists", "syntax"),
        ]
    if not isinstance(value, dict):
        return None, [
            *faults,
            Fault(file, "$", "is no JSON object", "wrap the fields in { }", "type"),
        ]
    for path, key in _repeated("$", value):
        faults.append(
            Fault(file, f"{path}.{key}", "the key is there twice; all but the last would be lost", "keep one of them",
                  "duplicate-key")
        )  # fmt: skip
    if _has_surrogate(value):
        faults.append(
            Fault(file, "$", "holds half of a surrogate pair (\\ud800 to \\udfff)", "write the character itself",
                  "encoding")
        )  # fmt: skip
    return value, faults


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        result.repeated = tuple(sorted({key for key in keys if keys.count(key) > 1}))
    return result


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _repeated(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Object):
        yield from ((path, key) for key in value.repeated)
        for key, item in value.items():
            yield from _repeated(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _repeated(f"{path}[{index}]", item)


def _has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
