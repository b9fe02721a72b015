# SPDX-License-Identifier: Apache-2.0
"""The verb bump: how each patch stands on another vLLM. Writes nothing but the download."""

from __future__ import annotations

import argparse
import re
import shlex
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import environment, fetch, lock
from b12x_overlay.patching.entry import Entry
from b12x_overlay.patching.fit import Fit, HunkFit, carry, fit_file, summary
from b12x_overlay.patching.patchset import PatchSet
from b12x_overlay.patching.sources import sources
from b12x_overlay.patching.target import at_folder

_VERSION = re.compile(r"^\d+(\.\w+)+$")
_COLOUR = {Fit.EXACT: "green", Fit.MOVED: "yellow", Fit.ABSORBED: "yellow", Fit.CONFLICT: "red"}


@dataclass(frozen=True, slots=True)
class FileFit:
    """One patch's relation to one file of the other vLLM."""

    path: str
    fit: Fit
    hunks: tuple[HunkFit, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PatchFit:
    """One patch's relation to the other vLLM."""

    name: str
    fit: Fit
    files: tuple[FileFit, ...]


@dataclass(frozen=True)
class Other:
    """The other vLLM: its files' names, and the bytes of those that matter."""

    label: str
    names: frozenset[str]
    files: dict[str, bytes]


def command(args: argparse.Namespace, console: Console, patch_set: PatchSet) -> int:
    """Judge and report."""
    wanted = {*patch_set.chains, *(file.path for file in patch_set.overlay)}
    other = _open(args, console, wanted)
    fits = judge(patch_set, other)
    taken = [file.path for file in patch_set.overlay if file.path in other.names]
    code = (
        ExitCode.OK
        if all(one.fit is Fit.EXACT for one in fits) and not taken
        else ExitCode.DIFFERENT
    )
    console.json(_document(other, fits, taken, int(code)))
    console.say(f"patch set for vLLM {patch_set.pin.version} on {other.label}")
    console.table(
        [(one.name, f"{len(one.files)} files", str(one.fit)) for one in fits], ("patch", "files", "fit"),
        lambda cell: _COLOUR.get(Fit(cell), "") if cell in set(Fit) else "",
    )  # fmt: skip
    for line in _details(fits, console.verbosity > 0):
        console.say(line)
    for path in taken:
        console.say(f"  overlay: {path} exists there: upstream has a file of that name")
    console.say(f"next: {_advice(fits, bool(taken))}")
    return int(code)


def judge(patch_set: PatchSet, other: Other) -> list[PatchFit]:
    """Each patch in order, on what the earlier ones leave."""
    current = dict(other.files)
    result = []
    for patch in patch_set.patches:
        files = []
        for one in patch.diffs:
            data = current.get(one.path)
            if data is None:
                files.append(FileFit(one.path, Fit.CONFLICT, (), _gone(one.path, other.names)))
                continue
            fits = fit_file(one, data)
            current[one.path] = carry(fits, data)
            files.append(FileFit(one.path, summary(fits), tuple(fits)))
        kinds = {file.fit for file in files}
        mixed = Fit.ABSORBED in kinds and len(kinds) > 1
        worst = next(
            kind for kind in (Fit.CONFLICT, Fit.ABSORBED, Fit.MOVED, Fit.EXACT) if kind in kinds
        )
        result.append(PatchFit(patch.name, Fit.CONFLICT if mixed else worst, tuple(files)))
    return result


def _open(args: argparse.Namespace, console: Console, wanted: Iterable[str]) -> Other:
    path = Path(args.other).expanduser()
    if path.is_dir():
        return _folder(path, wanted)
    if path.is_file():
        return _archive(path, wanted)
    if not _VERSION.match(args.other):
        raise CommandError(
            f"{args.other} is neither a version, nor a folder, nor a file",
            code=ExitCode.USAGE,
            reason="usage",
            hint="scripts/apply-patches bump 0.34.0",
        )
    archive = sources() / f"vllm-{args.other}.tar.gz"
    if not archive.exists():
        if args.dry_run:
            raise CommandError(
                f"{archive} is not there, and --dry-run fetches nothing",
                code=ExitCode.DIFFERENT,
                reason="not-fetched",
            )
        environment.enter(f"with {archive.name} in {archive.parent} no environment is needed")
        archive.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another run that fetches into {archive.parent}"
        with lock.exclusive(archive.parent, lambda: console.progress(waiting)):
            console.progress(f"fetching {archive.name}")
            archive = fetch.download("vllm", args.other, archive.parent, None, console.progress)
        console.progress(f"sha256 of {archive.name}: {fetch.file_sha256(archive)}")
    return _archive(archive, wanted)


def _folder(path: Path, wanted: Iterable[str]) -> Other:
    target = at_folder(path)
    names = frozenset(
        file.relative_to(target.root).as_posix() for file in (target.root / "vllm").rglob("*.py")
    )
    found = {name: target.read(name) for name in wanted}
    files = {name: entry.data for name, entry in found.items() if isinstance(entry, Entry)}
    return Other(f"{path}{f' ({target.version})' if target.version else ''}", names, files)


def _archive(path: Path, wanted: Iterable[str]) -> Other:
    try:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                names = frozenset(wheel.namelist())
                return Other(
                    str(path), names, {name: wheel.read(name) for name in wanted if name in names}
                )
        every: set[str] = set()
        files: dict[str, bytes] = {}
        keep = set(wanted)
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                name = member.name.partition("/")[2]
                every.add(name)
                if name in keep and (stream := tar.extractfile(member)):
                    files[name] = stream.read()
        return Other(str(path), frozenset(every), files)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        again = f"rm {shlex.quote(str(path))}, then run the command again"
        raise CommandError(
            f"{path}: {error}: damaged or truncated",
            reason="bad-archive",
            hint=again if path.parent == sources() else "give a whole one",
        ) from error


def _gone(path: str, names: frozenset[str]) -> str:
    base = path.rpartition("/")[2]
    similar = (
        sorted(name for name in names if name.rpartition("/")[2] == base)[:3]
        if base != "__init__.py"
        else []
    )
    return "the file is gone" + (f"; files of that name: {', '.join(similar)}" if similar else "")


def _details(fits: list[PatchFit], everything: bool) -> list[str]:
    lines = []
    for one in fits:
        for file in one.files:
            if file.detail:
                lines.append(f"  {one.name}: {file.path}: {file.detail}")
            for hunk in file.hunks:
                if hunk.fit is not Fit.EXACT or everything:
                    text = hunk.detail or f"line {hunk.line}"
                    lines.append(
                        f"  {one.name}: {file.path}:{hunk.line}: {hunk.fit}: {text} "
                        f"(patches/{one.name}.patch:{hunk.hunk.line})"
                    )
    return lines


def _document(other: Other, fits: list[PatchFit], taken: list[str], code: int) -> dict[str, Any]:
    return {
        "command": "bump",
        "other": other.label,
        "exit": code,
        "patches": [
            {
                "name": one.name,
                "fit": str(one.fit),
                "files": [
                    {
                        "path": file.path,
                        "fit": str(file.fit),
                        "detail": file.detail,
                        "hunks": [
                            {"fit": str(hunk.fit), "line": hunk.line, "patch_line": hunk.hunk.line,
                             "offset": hunk.offset if hunk.fit is Fit.MOVED else 0, "detail": hunk.detail}
                            for hunk in file.hunks
                        ],
                    }
                    for file in one.files
                ],
            }
            for one in fits
        ],
        "overlay_taken": taken,
    }  # fmt: skip


def _advice(fits: list[PatchFit], taken: bool) -> str:
    kinds = {one.fit for one in fits}
    if kinds <= {Fit.EXACT} and not taken:
        return "all hunks stand where they did: change the pin and the hashes ('Moving to another vLLM version', README.md)"
    return (
        "moved: look at each place, then export; conflict: redo the hunk; absorbed: drop the patch "
        "('Moving to another vLLM version' and 'If upstream fixes it', README.md)"
    )
