# SPDX-License-Identifier: Apache-2.0
"""Which bytes to write: pure functions from a survey to changes, or to the problems that forbid any change."""

from __future__ import annotations

from dataclasses import dataclass, field

from b12x_overlay.patching import recorded
from b12x_overlay.patching.chain import ChainError, at, position
from b12x_overlay.patching.entry import Blocked, Change, Entry
from b12x_overlay.patching.patchset import MARKER
from b12x_overlay.patching.survey import Survey


@dataclass(slots=True)
class Plan:
    """Changes in the order of writing (the marker last), or problems; with a problem nothing is written."""

    changes: list[Change] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Paths in the way; ``state.judge`` says why."""

    def put(self, path: str, old: Entry | None, new: Entry | None) -> None:
        """Record a change if there is one."""
        if old != new:
            self.changes.append(Change(path, old, new))


def apply(survey: Survey) -> Plan:
    """From whatever step each file is at (of this set or of the recorded one) to all patches applied.

    Raises:
        ChainError: patches/ is inconsistent.
    """
    plan = Plan()
    for path, chain in survey.patch_set.chains.items():
        entry = survey.entry(path)
        have = None if entry is None else position(entry, chain)
        if entry is not None and have is None:
            base = _recorded_base(survey, path, entry)
            have = None if base is None else position(base, chain)
            if base is not None and have is not None:
                plan.put(path, entry, at(base, chain, have, len(chain)))
                continue
        if entry is None or have is None:
            plan.problems.append(path)
            continue
        plan.put(path, entry, at(entry, chain, have, len(chain)))
    _drop_older_chains(survey, plan)
    _put_overlay(survey, plan)
    _drop_older_overlay(survey, plan)
    found = survey.found[MARKER]
    if isinstance(found, Blocked) or (found is not None and not recorded.is_ours(found)):
        plan.problems.append(MARKER)
    else:
        plan.put(MARKER, found, Entry(survey.marker, found.executable if found else False))
    return plan


def revert(survey: Survey) -> Plan:
    """From whatever step each file is at to none; overlay files and the marker go.

    Original bytes are derived by taking the patches off and are checked against the pinned sha256. On another
    vLLM version touched files cannot hold this set, so only leftovers are removed there.
    """
    plan = Plan()
    for path, chain in survey.patch_set.chains.items():
        entry = survey.entry(path)
        have = None if entry is None else position(entry, chain)
        if entry is not None and have is not None:
            if have:
                plan.put(path, entry, at(entry, chain, have, 0))
            continue
        base = None if entry is None else _recorded_base(survey, path, entry)
        if base is not None:
            plan.put(path, entry, base)
        elif not survey.wrong_version:
            plan.problems.append(path)
    _drop_older_chains(survey, plan)
    for file in survey.patch_set.overlay:
        found = survey.found[file.path]
        if found is None:
            continue
        if isinstance(found, Blocked) or found.sha256 not in (
            file.sha256,
            _recorded_digest(survey, file.path),
        ):
            plan.problems.append(file.path)
        else:
            plan.put(file.path, found, None)
    _drop_older_overlay(survey, plan)
    marker = survey.found[MARKER]
    if isinstance(marker, Blocked) or (marker is not None and not recorded.is_ours(marker)):
        plan.problems.append(MARKER)
    else:
        plan.put(MARKER, marker, None)
    return plan


def _put_overlay(survey: Survey, plan: Plan) -> None:
    for file in survey.patch_set.overlay:
        found = survey.found[file.path]
        new = Entry(file.data, file.executable)
        if found is None:
            plan.put(file.path, None, new)
        elif isinstance(found, Entry) and found.sha256 in (
            file.sha256,
            _recorded_digest(survey, file.path),
        ):
            plan.put(file.path, found, new)
        else:  # never overwritten: an upstream file, or somebody's edit
            plan.problems.append(file.path)


def _drop_older_overlay(survey: Survey, plan: Plan) -> None:
    if survey.recorded is None:
        return
    current = {file.path for file in survey.patch_set.overlay}
    for path, digest in survey.recorded.overlay.items():
        found = survey.found[path]
        if path in current or path in survey.patch_set.chains or found is None:
            continue
        if isinstance(found, Blocked) or found.sha256 != digest:
            plan.problems.append(path)
        else:
            plan.put(path, found, None)


def _drop_older_chains(survey: Survey, plan: Plan) -> None:
    if survey.recorded is None:
        return
    for path, chain in survey.recorded.chains.items():
        entry = survey.entry(path)
        if path in survey.patch_set.chains or entry is None:
            continue
        base = _recorded_base(survey, path, entry)
        if base is not None:
            plan.put(path, entry, base)
        elif position(entry, chain) != 0 and not survey.wrong_version:
            plan.problems.append(path)


def _recorded_base(survey: Survey, path: str, entry: Entry) -> Entry | None:
    """The original bytes of a file that the recorded set patched; None if it does not explain the bytes."""
    chain = survey.recorded.chains.get(path) if survey.recorded else None
    have = position(entry, chain) if chain else None
    if chain is None or have is None:
        return None
    try:
        return at(entry, chain, have, 0)
    except ChainError:  # a damaged record
        return None


def _recorded_digest(survey: Survey, path: str) -> str | None:
    return survey.recorded.overlay.get(path) if survey.recorded else None
