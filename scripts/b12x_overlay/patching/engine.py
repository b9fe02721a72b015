# SPDX-License-Identifier: Apache-2.0
"""apply, revert, status and verify on a folder target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import bytecode, journal, lock, plan, record, transaction
from b12x_overlay.patching.chain import ChainError, at, position
from b12x_overlay.patching.entry import Blocked, Change, Entry
from b12x_overlay.patching.patchset import MARKER, PatchSet
from b12x_overlay.patching.state import FileState, Judgement, State, judge
from b12x_overlay.patching.survey import Survey, survey
from b12x_overlay.patching.target import FolderTarget, refuse_to_write, with_record

Say = Callable[[str], None]


@dataclass(slots=True)
class Outcome:
    """What a verb found or did."""

    verb: str
    outcome: str
    """applied, already applied, would apply, refused … as shown to people; stable, for --json too."""
    code: ExitCode
    judgement: Judgement
    changed: list[str] = field(default_factory=list)
    """Paths written or removed, or that would be."""
    notes: list[str] = field(default_factory=list)
    problems: list[FileState] = field(default_factory=list)


def status(target: FolderTarget, patch_set: PatchSet) -> Outcome:
    """What the target holds; writes nothing and takes no lock."""
    judgement = _judge(target, _survey(target, patch_set))
    left = journal.unfinished(target.tree)
    good = judgement.state is State.APPLIED and left is None
    outcome = Outcome(
        "status", str(judgement.state), ExitCode.OK if good else ExitCode.DIFFERENT, judgement
    )
    if left is not None:
        outcome.outcome = "interrupted"
        outcome.notes.append(str(left))
    return outcome


def verify(target: FolderTarget, patch_set: PatchSet) -> Outcome:
    """Like status, and proves more: originals are derived back, compiled copies are compared with their source."""
    outcome = status(target, patch_set)
    outcome.verb = "verify"
    seen = _survey(target, patch_set)
    faults = []
    for path, chain in patch_set.chains.items():
        entry = seen.entry(path)
        have = position(entry, chain) if entry else None
        if entry is None or have is None:
            continue
        try:
            at(at(entry, chain, have, 0), chain, 0, len(chain))
        except ChainError as error:
            faults.append(str(error))
        faults += [
            f"{path}: {old} was compiled from other bytes"
            for old in bytecode.stale(target.tree.path(path))
        ]
    if faults:
        outcome.notes += faults
        outcome.code = ExitCode.DIFFERENT
    if outcome.code is ExitCode.OK:
        outcome.outcome = "verified"
    return outcome


def apply(
    target: FolderTarget,
    patch_set: PatchSet,
    *,
    dry_run: bool = False,
    say: Say = lambda _text: None,
) -> Outcome:
    """Bring the target to all patches applied, or refuse and change nothing."""
    return _write("apply", target, patch_set, dry_run, say)


def revert(
    target: FolderTarget,
    patch_set: PatchSet,
    *,
    dry_run: bool = False,
    say: Say = lambda _text: None,
) -> Outcome:
    """Bring the target back to its original bytes, or refuse and change nothing."""
    return _write("revert", target, patch_set, dry_run, say)


def _write(
    verb: str, target: FolderTarget, patch_set: PatchSet, dry_run: bool, say: Say
) -> Outcome:
    if dry_run:
        return _rehearse(verb, target, patch_set)
    done, _, already = _WORDS[verb]
    notes = []
    waiting = f"waiting for another run that writes to {target.label}"
    with lock.exclusive(target.root / "vllm", lambda: say(waiting)):
        if journal.unfinished(target.tree) is not None:
            refuse_to_write(target)
            recovered = transaction.recover(target.tree)
            way = "completed" if recovered is not None and recovered.committed else "undone"
            notes.append(
                f"an interrupted run of {recovered.verb if recovered else verb} was {way} first"
            )
        seen, changes, refused = _prepare(verb, target, patch_set)
        if refused is not None:
            refused.notes += notes
            return refused
        if not changes:
            return Outcome(verb, already, ExitCode.OK, _judge(target, seen), notes=notes)
        refuse_to_write(target)
        transaction.run(target.tree, verb, changes)
        after = _survey(target, patch_set)
    for change in changes:
        if target.read(change.path) != change.new:
            raise CommandError(
                f"{change.path} does not hold what was just written; another program writes to {target.label}",
                code=ExitCode.FAILED,
                reason="changed-meanwhile",
                hint="run scripts/apply-patches status",
            )
    return Outcome(
        verb, done, ExitCode.OK, _judge(target, after), [change.path for change in changes], notes
    )


def _rehearse(verb: str, target: FolderTarget, patch_set: PatchSet) -> Outcome:
    """A dry run: the same decisions without lock, recovery or writing."""
    _, would, already = _WORDS[verb]
    left = journal.unfinished(target.tree)
    if left is not None:
        judgement = _judge(target, _survey(target, patch_set))
        return Outcome(verb, would, ExitCode.DIFFERENT, judgement, notes=[str(left)])
    seen, changes, refused = _prepare(verb, target, patch_set)
    if refused is not None:
        return refused
    judgement = _judge(target, seen)
    if not changes:
        return Outcome(verb, already, ExitCode.OK, judgement)
    return Outcome(verb, would, ExitCode.DIFFERENT, judgement, [change.path for change in changes])


_WORDS = {
    "apply": ("applied", "would apply", "already applied"),
    "revert": ("reverted", "would revert", "not applied"),
}


def _prepare(
    verb: str, target: FolderTarget, patch_set: PatchSet
) -> tuple[Survey, list[Change], Outcome | None]:
    seen = _survey(target, patch_set)
    if verb == "apply" and seen.wrong_version:
        return seen, [], Outcome(verb, "refused", ExitCode.REFUSED, _judge(target, seen))
    made = _plan(verb, seen)
    if made.problems:
        judgement = _judge(target, seen)
        bad = [
            file
            for file in judgement.files
            if file.path in made.problems and file.state not in _FINE
        ]
        return (
            seen,
            [],
            Outcome(verb, "refused", ExitCode.REFUSED, judgement, problems=_unique(bad)),
        )
    return seen, _with_record(target, seen, made.changes), None


_FINE = (State.APPLIED, State.NOT_APPLIED, State.OTHER_SET)


def _unique(files: list[FileState]) -> list[FileState]:
    return list({(file.path, file.detail): file for file in files}.values())


def _plan(verb: str, seen: Survey) -> plan.Plan:
    try:
        return plan.apply(seen) if verb == "apply" else plan.revert(seen)
    except ChainError as error:
        raise CommandError(
            f"patches/ is not in order: {error}", code=ExitCode.FAILED, reason="bad-patch-set"
        ) from error


def _with_record(target: FolderTarget, seen: Survey, changes: list[Change]) -> list[Change]:
    added = {MARKER, *(file.path for file in seen.patch_set.overlay)}
    if seen.recorded is not None:
        added |= seen.recorded.overlay.keys()
    return with_record(target, changes, _final(seen, changes), added)


def _final(seen: Survey, changes: list[Change]) -> dict[str, Entry | None]:
    files = {path: found for path, found in seen.found.items() if not isinstance(found, Blocked)}
    return {**files, **{change.path: change.new for change in changes}}


def _survey(target: FolderTarget, patch_set: PatchSet) -> Survey:
    return survey(target, patch_set, target.version)


def _judge(target: FolderTarget, seen: Survey) -> Judgement:
    """The judgement with RECORD's rows in it."""
    judgement = judge(seen)
    entry = target.record_entry()
    if entry is None or target.record is None or judgement.state is not State.APPLIED:
        return judgement
    bad = record.wrong_rows(entry.data, _final(seen, []))
    if not bad:
        return judgement
    row = FileState(
        target.record, "record", State.INCOMPLETE, "", entry.sha256,
        f"rows of {len(bad)} files are out of date, first {bad[0]}", "record",
    )  # fmt: skip
    return replace(judgement, state=State.INCOMPLETE, extra=(*judgement.extra, row))
