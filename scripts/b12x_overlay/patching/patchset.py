# SPDX-License-Identifier: Apache-2.0
"""Loads patches/patchset.toml, the one pin file, with the patches and overlay files that it lists.

Rules that loading checks (``PatchSetError`` names the place):

* every ``[[patch]]`` has a name, the texts what, why and until, and a file ``patches/<name>.patch``; no other
  ``*.patch`` file lies there;
* its ``[[patch.file]]`` rows are exactly the files its diff touches, each with the sha256 of the bytes before and
  after; where two patches touch one file, before of the later one is after of the earlier one;
* patches touch vllm/ only (nothing else is in an installed package) and add no files: new files live in overlay/;
* a file below overlay/ belongs to at most one patch, through its ``overlay`` list of files and folders; one that
  belongs to none is not applied and is named by ``list`` (the project's tests fail on it).
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from b12x_overlay.patching.diff import FileDiff, PatchFormatError, parse
from b12x_overlay.patching.model import (
    MARKER,
    Artifact,
    Chain,
    OverlayFile,
    Patch,
    PatchSet,
    Pin,
    Step,
    TouchedFile,
    sha256,
)

__all__ = [
    "MARKER",
    "PIN_FILE",
    "Artifact",
    "Chain",
    "OverlayFile",
    "Patch",
    "PatchSet",
    "PatchSetError",
    "Pin",
    "Step",
    "TouchedFile",
    "load",
    "read_pin_file",
    "sha256",
]

PIN_FILE = "patchset.toml"
_NAME = re.compile(r"^[a-z0-9][a-z0-9-]*$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


class PatchSetError(Exception):
    """patches/ or overlay/ is not in order; the message says where and what is wanted."""


def load(patches: Path, overlay: Path) -> PatchSet:
    """Read and check the set.

    Raises:
        PatchSetError: a rule of this module is broken.
    """
    document = read_pin_file(patches)
    pin = _pin(document)
    revision = document.get("revision")
    if document.get("schema") != 1 or not isinstance(revision, int):
        raise PatchSetError(f"{PIN_FILE}: schema = 1 and revision = N expected, found other values")
    rows = document.get("patch", [])
    available = dict(_overlay_files(overlay))
    owner: dict[str, str] = {}
    built = tuple(_patch(patches, row, available, owner) for row in rows)
    _check_names(patches, [patch.name for patch in built])
    unclaimed = tuple(path for path in available if path not in owner)
    result = PatchSet(revision, pin, built, unclaimed)
    _check_chains(result)
    return result


def read_pin_file(patches: Path) -> dict[str, Any]:
    """The parsed patchset.toml.

    Raises:
        PatchSetError: missing or not TOML.
    """
    path = patches / PIN_FILE
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError as error:
        raise PatchSetError(
            f"{path} is missing: run the command from a complete copy of this repository"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PatchSetError(f"{path}: {error}") from error


def _pin(document: dict[str, Any]) -> Pin:
    table = document.get("pin")
    if not isinstance(table, dict):
        raise PatchSetError(f"{PIN_FILE}: table [pin] is missing")
    try:
        return Pin(
            _text(table, "version", "[pin]"),
            _text(table, "commit", "[pin]"),
            _artifact(table["sdist"]),
            tuple(_artifact(row) for row in table["wheels"]),
        )
    except (KeyError, TypeError) as error:
        raise PatchSetError(f"{PIN_FILE}: [pin] lacks {error}") from error


def _artifact(row: dict[str, Any]) -> Artifact:
    return Artifact(_text(row, "filename", "[pin]"), _digest(row, "sha256", "[pin]"))


def _patch(
    folder: Path, row: dict[str, Any], available: dict[str, OverlayFile], owner: dict[str, str]
) -> Patch:
    name = _text(row, "name", "[[patch]]")
    where = f"[[patch]] {name}"
    if not _NAME.match(name):
        raise PatchSetError(f"{PIN_FILE}: {where}: a name has small letters, digits and hyphens")
    path = folder / f"{name}.patch"
    try:
        data = path.read_bytes()
        parsed = parse(data)
    except FileNotFoundError as error:
        raise PatchSetError(
            f"{path} is missing, {PIN_FILE} lists {name}: restore it, or write it with scripts/apply-patches export"
        ) from error
    except PatchFormatError as error:
        raise PatchSetError(f"{path}: {error}") from error
    files = tuple(
        TouchedFile(
            _text(entry, "path", where),
            _digest(entry, "before", where),
            _digest(entry, "after", where),
        )
        for entry in row.get("file", [])
    )
    _check_files(path, where, parsed, files)
    claims = tuple(row.get("overlay", []))
    return Patch(
        name, _text(row, "what", where), _text(row, "why", where), _text(row, "until", where),
        tuple(row.get("fragments", [])), claims, files, data, parsed,
        tuple(_claimed(where, name, claims, available, owner)),
    )  # fmt: skip


def _check_files(
    path: Path, where: str, parsed: tuple[FileDiff, ...], files: tuple[TouchedFile, ...]
) -> None:
    listed, touched = [file.path for file in files], [diff.path for diff in parsed]
    if sorted(listed) != sorted(touched) or len(set(listed)) != len(listed):
        raise PatchSetError(
            f"{PIN_FILE}: {where}: [[patch.file]] lists {sorted(listed)}, {path.name} touches {sorted(touched)}; "
            "run scripts/apply-patches export"
        )
    for diff in parsed:
        if diff.creates or diff.deletes:
            raise PatchSetError(
                f"{path}: {diff.path} is created or deleted; new files belong in overlay/"
            )
        if not diff.path.startswith("vllm/") or diff.path == MARKER:
            raise PatchSetError(
                f"{path}: {diff.path} is outside vllm/, which is all that an installed package has"
            )


def _claimed(
    where: str,
    name: str,
    claims: tuple[str, ...],
    available: dict[str, OverlayFile],
    owner: dict[str, str],
) -> Iterator[OverlayFile]:
    for claim in claims:
        found = [
            file
            for path, file in available.items()
            if path == claim or path.startswith(f"{claim}/")
        ]
        if not found:
            raise PatchSetError(
                f"{PIN_FILE}: {where}: overlay/{claim} does not exist (a file or a folder with files)"
            )
        for file in found:
            other = owner.setdefault(file.path, name)
            if other != name:
                raise PatchSetError(
                    f"{PIN_FILE}: {where}: overlay/{file.path} already belongs to {other}"
                )
            yield file


def _overlay_files(overlay: Path) -> Iterator[tuple[str, OverlayFile]]:
    if not overlay.is_dir():
        return
    for source in sorted(overlay.rglob("*")):
        path = source.relative_to(overlay).as_posix()
        if "__pycache__" in source.parts or source.suffix == ".pyc" or source.name.startswith("."):
            continue
        if source.is_symlink() or not (source.is_file() or source.is_dir()):
            raise PatchSetError(
                f"{source} is a symbolic link or a special file: overlay/ holds plain files"
            )
        if source.is_dir():
            continue
        if not path.startswith("vllm/") or path == MARKER:
            raise PatchSetError(
                f"{source}: overlay files land in vllm/, and {MARKER} is written by the command"
            )
        data = source.read_bytes()
        yield (
            path,
            OverlayFile(path, source, data, sha256(data), bool(source.stat().st_mode & 0o100)),
        )


def _check_names(folder: Path, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise PatchSetError(f"{PIN_FILE}: two patches are called {name}")
    for path in sorted(folder.glob("*.patch")):
        if path.stem not in names:
            raise PatchSetError(
                f"{path} is not listed: add a [[patch]] to {PIN_FILE}, or remove the file"
            )


def _check_chains(patch_set: PatchSet) -> None:
    overlay = {file.path for file in patch_set.overlay}
    for path, chain in patch_set.chains.items():
        if path in overlay:
            raise PatchSetError(
                f"{path} is an overlay file and is patched: edit overlay/{path} instead"
            )
        for first, second in itertools.pairwise(chain):
            if first.after != second.before:
                raise PatchSetError(
                    f"{PIN_FILE}: {path}: {second.patch} starts from {second.before[:12]}, but {first.patch} ends at "
                    f"{first.after[:12]}; run scripts/apply-patches export"
                )


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PatchSetError(f"{PIN_FILE}: {where}: {key} (a text) is missing")
    return value


def _digest(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not _SHA256.match(value):
        raise PatchSetError(
            f"{PIN_FILE}: {where}: {key} must be a sha256 in small hex digits, found {value!r}"
        )
    return value
