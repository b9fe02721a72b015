# SPDX-License-Identifier: Apache-2.0
"""The file that names a repository's lines (``.ci/lines.toml``) and the rules of the sync between them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode

LINES_FILE = Path(".ci/lines.toml")


@dataclass(frozen=True)
class Keep:
    """A path (or glob, ``*`` also matches ``/``) whose beta version stays, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Lines:
    """What ``lines.toml`` says; the defaults are those of a repository without the file."""

    remote: str = "origin"
    canonical: str = ""
    beta: str = ""
    work_branch: str = "sync/canonical-to-beta"
    folder: str = "changes"
    component: str = "vllm"
    repository: str = ""
    receipts: str = ".ci/releases"
    patchset: str = "patches/patchset.toml"
    author: str = ""
    category: str = "internal"
    keep: tuple[Keep, ...] = ()
    handles: dict[str, str] = field(default_factory=dict)


_TABLES = {
    "lines": {"remote", "canonical", "beta", "work-branch"},
    "fragments": {"folder", "component", "repository", "receipts", "patchset"},
    "sync": {"author", "category", "keep", "handles"},
}


def read_lines(path: Path) -> Lines:
    """Read *path*.

    Raises:
        CommandError: unreadable, not TOML, an unknown key or a value of another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    return parse_lines(text, path)


def parse_lines(text: str, path: Path) -> Lines:
    """Read the text of a lines file; *path* is for messages.

    Raises:
        CommandError: as `read_lines`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(path, f"is not TOML: {error}") from error
    values: dict[str, Any] = {}
    for table, content in document.items():
        known = _TABLES.get(table)
        if known is None or not isinstance(content, dict):
            raise _wrong(path, f"[{table}] is unknown; the tables are {', '.join(_TABLES)}")
        for key, value in content.items():
            if key not in known:
                raise _wrong(
                    path, f"{table}.{key} is unknown; [{table}] has {', '.join(sorted(known))}"
                )
            values[key.replace("-", "_")] = _value(path, f"{table}.{key}", key, value)
    lines = Lines(**values)
    check_lines(lines, str(path))
    return lines


_FORMS = {
    "component": (
        re.compile(r"[a-z0-9]+(-[a-z0-9]+)*"),
        "lower-case letters, digits and single hyphens",
    ),
    "author": (re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\[bot\])?"), "a GitHub handle without @"),
    "category": (
        re.compile("breaking|feature|fix|performance|compatibility|internal"),
        "a fragment's category",
    ),
}
_FOLDERS = ("folder", "receipts", "patchset")


def check_lines(lines: Lines, where: str) -> None:
    """Check the forms of what the file or the flags say; *where* names them in messages.

    Raises:
        CommandError: a folder outside the repository, a wrong handle, component or category.
    """
    for key in _FOLDERS:
        value: str = getattr(lines, key)
        parts = PurePosixPath(value).parts
        if not parts or value.startswith("/") or ".." in parts or value != "/".join(parts):
            raise _wrong_form(
                where, key, value, "a path inside the repository, such as changes or .lil/changes"
            )
    for key, (form, wanted) in _FORMS.items():
        value = getattr(lines, key)
        if not form.fullmatch(value) and not (key == "author" and not value):
            raise _wrong_form(where, key, value, wanted)
    for handle in lines.handles.values():
        if not _FORMS["author"][0].fullmatch(handle):
            raise _wrong_form(where, "handles", handle, _FORMS["author"][1])


def _wrong_form(where: str, key: str, value: str, wanted: str) -> CommandError:
    return CommandError(
        f"{where}: {key} is {value!r}; wanted {wanted}", code=ExitCode.USAGE, reason="lines-file"
    )


def _value(path: Path, name: str, key: str, value: Any) -> Any:
    if key == "keep":
        return tuple(_keep(path, entry) for entry in _typed(path, name, value, list))
    if key == "handles":
        handles = _typed(path, name, value, dict)
        return {
            mail.lower(): _typed(path, f'{name}."{mail}"', handle, str)
            for mail, handle in handles.items()
        }
    text = _typed(path, name, value, str)
    if not text:
        raise _wrong(path, f"{name} is empty")
    return text


def _keep(path: Path, entry: Any) -> Keep:
    if (
        not isinstance(entry, dict)
        or set(entry) != {"path", "why"}
        or not all(isinstance(value, str) and value for value in entry.values())
    ):
        raise _wrong(path, f"sync.keep needs a path and a why, both texts; found {entry!r}")
    return Keep(entry["path"], entry["why"])


def _typed(path: Path, name: str, value: Any, wanted: type) -> Any:
    if not isinstance(value, wanted):
        raise _wrong(path, f"{name} must be {wanted.__name__}, found {value!r}")
    return value


def _wrong(path: Path, what: str) -> CommandError:
    return CommandError(
        f"{path}: {what}", code=ExitCode.USAGE, reason="lines-file", hint=f"correct {path}"
    )
