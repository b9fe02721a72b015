# SPDX-License-Identifier: Apache-2.0
"""Is the installed vLLM stock, patched, or something else? Decided by the bytes, without importing it.

:func:`quick` looks at the files that the patch set touches; :func:`full` also checks every row of the
distribution's RECORD, files that no row lists, bytecode that does not come from the source beside it, another vllm
earlier on the path, and mounts over the package.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.machinery
import importlib.util
import marshal
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import CodeType

from b12x_overlay.doctor import packages
from b12x_overlay.image.expected import Expected

_PYC_HEADER = 16


class State(StrEnum):
    """What the bytes say."""

    STOCK = "stock"
    PATCHED = "patched"
    MODIFIED = "modified"
    OTHER_VERSION = "other-version"
    ABSENT = "absent"


@dataclass(frozen=True)
class Fault:
    """One file that is not as it should be: its path relative to site-packages, and *what* is wrong with it."""

    path: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """The state, and the faults that make it "modified".

    Attributes:
        site: the folder that holds the package and its dist-info; *folder* is the package.
        patchset: id of the patch set that is in it, "" if stock or unknown.
        files: number of files whose bytes were compared.
    """

    state: State
    version: str = ""
    site: Path | None = None
    folder: Path | None = None
    patchset: str = ""
    faults: tuple[Fault, ...] = ()
    files: int = 0


def quick(expected: Expected) -> Verdict:
    """Compare the files that the patch set touches or adds."""
    installed = packages.find("vllm")
    if installed is None:
        return Verdict(State.ABSENT)
    site, version = installed.site, installed.version
    folder = packages.package_folder("vllm") or site / "vllm"
    if version.split("+")[0] != expected.version:
        return Verdict(State.OTHER_VERSION, version, site, folder)
    root = folder.parent  # an editable install keeps its files elsewhere than its dist-info
    digests = {path: digest(root / path) for path in (*expected.before, *expected.added)}
    stock = {path: expected.before.get(path) for path in digests}
    patched = {**expected.after, **expected.added}
    if digests == stock:
        return Verdict(State.STOCK, version, site, folder, files=len(digests))
    faults = tuple(
        _fault(path, digests[path], expected) for path in digests if digests[path] != patched[path]
    )
    state = State.MODIFIED if faults else State.PATCHED
    return Verdict(
        state, version, site, folder, "" if faults else expected.patchset, faults, len(digests)
    )


def full(expected: Expected) -> Verdict:
    """Everything that :func:`quick` does, and the whole package."""
    verdict = quick(expected)
    if verdict.site is None or verdict.folder is None or verdict.state is State.OTHER_VERSION:
        return verdict
    rows = record_rows(verdict.site, verdict.version)
    faults = {fault.path: fault for fault in verdict.faults}
    known = set(expected.before) | set(expected.added)
    if rows is None:
        faults["RECORD"] = Fault("RECORD", "missing: the package cannot be checked")
        rows = {}
    for fault in (*_rows(verdict.site, rows), *_unlisted(verdict.site, verdict.folder, rows)):
        # A stock tree has no added file; a touched file's own fault says more than its RECORD row.
        if not (fault.path in faults and fault.path in known):
            faults[fault.path] = fault
    for fault in (*_bytecode(verdict.folder, known), *_shadowed(verdict), *_mounts(verdict.folder)):
        faults.setdefault(fault.path, fault)
    ordered = tuple(sorted(faults.values(), key=lambda fault: fault.path))
    state = State.MODIFIED if ordered else verdict.state
    patchset = "" if ordered else verdict.patchset
    return Verdict(
        state,
        verdict.version,
        verdict.site,
        verdict.folder,
        patchset,
        ordered,
        len(rows) + verdict.files,
    )


def digest(path: Path) -> str | None:
    """SHA-256 (hex) of a plain file; None if there is none. A symbolic link is no plain file."""
    try:
        with open(path, "rb", opener=_no_follow) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def record_path(site: Path, version: str) -> Path:
    """RECORD of the vllm *version* in *site*."""
    return site / f"vllm-{version}.dist-info" / "RECORD"


def record_rows(site: Path, version: str) -> dict[str, str] | None:
    """path -> sha256 (hex) of the rows with a hash; None without a readable RECORD."""
    try:
        with record_path(site, version).open(encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream))
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    result = {}
    for row in rows:
        if len(row) >= 2 and row[1].startswith("sha256="):
            text = row[1].removeprefix("sha256=")
            try:
                result[row[0]] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
            except ValueError:
                result[row[0]] = ""
    return result


def _fault(path: str, found: str | None, expected: Expected) -> Fault:
    if found is None:
        return Fault(path, "missing")
    if found == expected.before.get(path):
        return Fault(path, "not patched")
    if found == {**expected.after, **expected.added}.get(path):
        return Fault(path, "patched, unlike others")
    return Fault(path, "edited")


def _rows(site: Path, rows: dict[str, str]) -> list[Fault]:
    def check(item: tuple[str, str]) -> Fault | None:
        found = digest(site / item[0])
        if found == item[1]:
            return None
        return Fault(item[0], "missing" if found is None else "edited")

    # hashlib releases the interpreter lock; the package has 800 MB.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [fault for fault in pool.map(check, rows.items(), chunksize=64) if fault is not None]


def _unlisted(site: Path, folder: Path, rows: dict[str, str]) -> list[Fault]:
    faults = []
    if folder.parent != site:
        return []  # an editable install: its files are in no RECORD
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            path = os.path.relpath(os.path.join(root, name), site)  # noqa: PTH118 (5,800 files: Path is slow)
            if path not in rows:
                faults.append(Fault(path, "added: in no RECORD row"))
    return faults


def _bytecode(folder: Path, known: set[str]) -> list[Fault]:
    """Cached bytecode that Python would take for a touched module although it was made from other source."""
    faults = []
    for path in known:
        source = folder.parent / path
        if source.suffix != ".py":
            continue
        for cached in (importlib.util.cache_from_source(str(source)), str(source) + "c"):
            if _stale(source, Path(cached)):
                faults.append(
                    Fault(os.path.relpath(cached, folder.parent), f"bytecode of another {path}")
                )
    return faults


def _stale(source: Path, cached: Path) -> bool:
    try:
        data, text, status = cached.read_bytes(), source.read_bytes(), source.stat()
    except OSError:
        return False
    if data[:4] != importlib.util.MAGIC_NUMBER or len(data) < _PYC_HEADER:
        return False  # Python does not use it
    flags, mtime, size = struct.unpack("<III", data[4:_PYC_HEADER])
    if flags == 0 and (
        mtime != int(status.st_mtime) & 0xFFFFFFFF or size != status.st_size & 0xFFFFFFFF
    ):
        return False  # Python sees that it is old
    if flags & 2 and data[8:_PYC_HEADER] != importlib.util.source_hash(text):
        return False  # checked by hash: Python compiles again
    try:
        found = marshal.loads(data[_PYC_HEADER:])
        wanted = compile(text, str(source), "exec", dont_inherit=True)
    except (ValueError, EOFError, TypeError, SyntaxError):
        return True
    return not isinstance(found, CodeType) or found != wanted


def _shadowed(verdict: Verdict) -> list[Fault]:
    """``import vllm`` would find another copy than the one whose RECORD was read."""
    spec = importlib.machinery.PathFinder.find_spec("vllm")
    if spec is None or spec.origin is None or verdict.site is None:
        return []
    found = Path(spec.origin).parent.resolve()
    if found.parent == verdict.site or not (verdict.site / "vllm").is_dir():
        return []
    return [Fault(str(found), f"imported instead of {verdict.site / 'vllm'}")]


def _mounts(folder: Path) -> list[Fault]:
    """Mount points inside the package: files that the image does not hold (docker run -v file:/...)."""
    try:
        lines = (
            Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return []
    points = [
        line.split()[4].encode().decode("unicode_escape") for line in lines if len(line.split()) > 4
    ]
    return [
        Fault(point, "mounted over the package")
        for point in points
        if Path(point).is_relative_to(folder)
    ]


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
