# SPDX-License-Identifier: Apache-2.0
"""The wheel target: reads a vLLM wheel and writes a patched one with its own local version.

``vllm-0.33.0-….whl`` becomes ``vllm-0.33.0+b12x.N-….whl``: dist-info folder, METADATA and RECORD follow; every other
member is copied as it is, compressed bytes, time and attributes included, so that the result is the same on every
machine and 336 MB take a second.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import again, fetch, plan, record, report
from b12x_overlay.patching.chain import ChainError
from b12x_overlay.patching.engine import Outcome
from b12x_overlay.patching.entry import Change, Entry, Found
from b12x_overlay.patching.patchset import PatchSet
from b12x_overlay.patching.state import FileState, State, judge
from b12x_overlay.patching.survey import Survey, survey
from b12x_overlay.patching.zipcopy import ZipCopy
from b12x_overlay.paths import build_dir

_NAME = re.compile(r"^(?P<dist>[^-]+)-(?P<version>[^-]+)-(?P<rest>.+)\.whl$")


@dataclass(frozen=True)
class WheelTarget:
    """An opened wheel."""

    path: Path
    zip: zipfile.ZipFile
    names: frozenset[str]
    info: str
    """The dist-info folder."""
    version: str

    def read(self, path: str) -> Found:
        """The member at *path*."""
        if path not in self.names:
            return None
        member = self.zip.getinfo(path)
        return Entry(self.zip.read(member), bool((member.external_attr >> 16) & 0o100))


def command(args: argparse.Namespace, console: Console, patch_set: PatchSet) -> int:
    """apply, status or verify on a wheel."""
    path = Path(args.target).expanduser()
    if args.verb == "revert":
        raise CommandError(
            f"{path}: a wheel is never changed in place, so there is nothing to revert",
            reason="wheel-revert",
            hint="install the original wheel",
        )
    with _opened(path, patch_set.pin.version) as archive:
        target = _target(path, archive)
        seen = survey(target, patch_set, target.version)
        outcome = _outcome(args.verb, target, seen)
        if outcome.judgement.state is not State.APPLIED:
            outcome.notes.append(_origin(path, patch_set))
        next_step = f"pip install --no-deps {shlex.quote(str(path))}"
        if outcome.code is not ExitCode.OK:
            apply = f"{again.command('apply', args.target)} writes a patched copy"
            next_step = apply if report.settled_by_apply(outcome) else ""
            if outcome.judgement.state is State.APPLIED:  # only RECORD is wrong
                next_step = "apply to the original wheel again"
        if args.verb == "apply" and outcome.code is ExitCode.OK and outcome.changed:
            result = (args.output or build_dir() / "wheels") / _new_name(path, patch_set)
            next_step = f"pip install --no-deps {shlex.quote(str(result))}"
            if args.dry_run:
                outcome.code, outcome.outcome = ExitCode.DIFFERENT, "would apply"
                output = () if args.output is None else ("--output", str(args.output))
                next_step = again.command("apply", args.target, *output)
            else:
                changes = _plan(seen).changes
                try:
                    write(target, changes, result, patch_set, console)
                except OSError as error:
                    raise CommandError(
                        f"{result} cannot be written: {error.strerror or error}",
                        code=ExitCode.FAILED,
                        reason="io",
                        hint="give --output a folder that can be written and has space",
                    ) from error
                outcome.notes.append(f"wrote {result}")
                outcome.judgement = judge(_resurvey(result, patch_set))
        described = {"kind": "wheel", "path": str(path), "version": target.version}
        report.show(console, outcome, patch_set, described, next_step)
        return int(outcome.code)


def write(
    target: WheelTarget, changes: list[Change], result: Path, patch_set: PatchSet, console: Console
) -> None:
    """Write the patched wheel to *result*, whole or not at all.

    Raises:
        CommandError: *result* is the input.
    """
    if result.exists() and result.samefile(target.path):
        raise CommandError(
            f"{result} is the input wheel", reason="same-file", hint="give another --output folder"
        )
    result.parent.mkdir(parents=True, exist_ok=True)
    files = {change.path: change.new for change in changes if change.new is not None}
    new_version = _local(target.version, patch_set)
    new_info = f"{target.info.split('-')[0]}-{new_version}.dist-info"
    metadata = _metadata(target, new_version)
    rows: dict[str, Entry | None] = {**files, f"{target.info}/METADATA": Entry(metadata)}
    listing = record.rename(
        record.update(_bytes(target, "RECORD"), rows, files.keys() - target.names),
        target.info,
        new_info,
    )
    console.progress(f"writing {result}")
    handle, name = tempfile.mkstemp(prefix=f".{result.name}-", dir=result.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w+b") as out, ZipCopy(target.zip, out) as copy:
            stamp = target.zip.getinfo(f"{target.info}/WHEEL")
            for member in target.zip.infolist():
                fresh = new_info + member.filename[len(target.info) :]
                if member.filename == f"{target.info}/RECORD":
                    last = member
                elif member.filename == f"{target.info}/METADATA":
                    copy.put(fresh, metadata, member)
                elif member.filename in files:
                    copy.put(member.filename, files[member.filename].data, member)
                elif member.filename.startswith(f"{target.info}/"):
                    copy.copy(member, fresh)
                else:
                    copy.copy(member, member.filename)
            for path, entry in files.items():
                if path not in target.names:
                    copy.put(path, entry.data, stamp, executable=entry.executable)
            copy.put(f"{new_info}/RECORD", listing, last)
        with temporary.open("rb") as done:
            os.fsync(done.fileno())
        temporary.chmod(0o644)
        temporary.replace(result)
    finally:
        temporary.unlink(missing_ok=True)


def _opened(path: Path, version: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise CommandError(
            f"{path} does not exist",
            reason="no-target",
            hint=f"check the path, or fetch a wheel: pip download --no-deps vllm=={version}",
        ) from error
    except OSError as error:
        raise CommandError(
            f"{path} cannot be read: {error.strerror or error}",
            reason="no-target",
            hint="give a wheel of vLLM that this user can read",
        ) from error
    except zipfile.BadZipFile as error:
        raise CommandError(
            f"{path}: {error}: the wheel is damaged or truncated",
            reason="bad-wheel",
            hint="download it again",
        ) from error


def _target(path: Path, archive: zipfile.ZipFile) -> WheelTarget:
    match = _NAME.match(path.name)
    names = archive.namelist()
    infos = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    if match is None or match["dist"] != "vllm" or len(infos) != 1 or len(set(names)) != len(names):
        raise CommandError(
            f"{path} is not a vLLM wheel (a name vllm-VERSION-….whl, one dist-info folder, no name twice)",
            reason="bad-wheel",
            hint="give a wheel of vLLM with its original file name",
        )
    info = infos.pop()
    for name in ("METADATA", "RECORD", "WHEEL"):
        if f"{info}/{name}" not in names:
            raise CommandError(f"{path} lacks {info}/{name}", reason="bad-wheel")
    if f"{info}/RECORD.jws" in names:
        raise CommandError(
            f"{path} is signed (RECORD.jws); a changed copy could not be", reason="signed-wheel"
        )
    found = re.search(rb"^Version: *(\S+)", archive.read(f"{info}/METADATA"), re.MULTILINE)
    return WheelTarget(path, archive, frozenset(names), info, found[1].decode() if found else "")


def _outcome(verb: str, target: WheelTarget, seen: Survey) -> Outcome:
    judgement = judge(seen)
    good = judgement.state is State.APPLIED
    if verb != "apply":
        code = ExitCode.OK if good else ExitCode.DIFFERENT
        if good and verb == "verify":
            bad = record.wrong_rows(_bytes(target, "RECORD"), _entries(seen))
            if bad:
                return Outcome(
                    verb, "RECORD is wrong", ExitCode.DIFFERENT, judgement, notes=[f"RECORD: {bad}"]
                )
        return Outcome(
            verb, "verified" if good and verb == "verify" else str(judgement.state), code, judgement
        )
    if seen.wrong_version:
        return Outcome(verb, "refused", ExitCode.REFUSED, judgement)
    made = _plan(seen)
    problems: list[FileState] = [file for file in judgement.files if file.path in made.problems]
    if problems:
        return Outcome(verb, "refused", ExitCode.REFUSED, judgement, problems=problems)
    if not made.changes:
        return Outcome(verb, "already applied", ExitCode.OK, judgement)
    return Outcome(
        verb, "applied", ExitCode.OK, judgement, [change.path for change in made.changes]
    )


def _plan(seen: Survey) -> plan.Plan:
    try:
        made = plan.apply(seen)
    except ChainError as error:
        raise CommandError(
            f"patches/ is not in order: {error}", code=ExitCode.FAILED, reason="bad-patch-set"
        ) from error
    if any(change.new is None for change in made.changes):
        raise CommandError(
            "the wheel holds another patch set of this project",
            reason="other-patch-set",
            hint="apply to the original wheel",
        )
    return made


def _resurvey(result: Path, patch_set: PatchSet) -> Survey:
    with zipfile.ZipFile(result) as archive:
        target = _target(result, archive)
        return survey(target, patch_set, target.version)


def _entries(seen: Survey) -> dict[str, Entry | None]:
    return {path: seen.entry(path) for path in seen.found}


def _bytes(target: WheelTarget, name: str) -> bytes:
    return target.zip.read(f"{target.info}/{name}")


def _metadata(target: WheelTarget, version: str) -> bytes:
    old = f"\nVersion: {target.version}".encode()
    return _bytes(target, "METADATA").replace(old, f"\nVersion: {version}".encode(), 1)


def _local(version: str, patch_set: PatchSet) -> str:
    """*version* with ``b12x.N`` in its local part; an earlier b12x mark is replaced."""
    public, _, local = version.partition("+")
    kept = re.sub(r"\.?b12x\.\d+$", "", local)
    return f"{public}+{kept}{'.' if kept else ''}b12x.{patch_set.revision}"


def _new_name(path: Path, patch_set: PatchSet) -> str:
    match = _NAME.match(path.name)
    assert match is not None
    return f"{match['dist']}-{_local(match['version'], patch_set)}-{match['rest']}.whl"


def _origin(path: Path, patch_set: PatchSet) -> str:
    digest = fetch.file_sha256(path)
    for wheel in patch_set.pin.wheels:
        if wheel.sha256 == digest:
            return f"this is the pinned {wheel.filename}"
    return f"this is not one of the pinned wheels (sha256 {digest[:12]}…); its touched files are checked all the same"
