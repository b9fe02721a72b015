# SPDX-License-Identifier: Apache-2.0
"""Says what a target holds, per file and per patch, from its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from b12x_overlay.patching.chain import executable_at, position
from b12x_overlay.patching.entry import Blocked, Entry
from b12x_overlay.patching.patchset import MARKER, Chain, Step
from b12x_overlay.patching.survey import Survey


class State(StrEnum):
    """What the table shows; ``reason`` is the same in kebab-case for --json."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    STALE_MARKER = "stale marker"
    LEFTOVER = "leftover overlay"
    INCOMPLETE = "incomplete"
    OTHER_SET = "other patch set"
    ABSORBED = "absorbed upstream"
    MODIFIED = "modified"
    MISSING = "missing"
    BLOCKED = "not a plain file"
    WRONG_VERSION = "wrong version"

    @property
    def reason(self) -> str:
        """The reason code."""
        return self.value.replace(" ", "-")


_ORDER = list(State)
"""From best to worst; of several faults the worst names a patch's or the target's state."""


@dataclass(frozen=True, slots=True)
class FileState:
    """One path of one patch."""

    path: str
    role: str
    """``patched``, ``overlay`` or ``marker``."""
    state: State
    wanted: str = ""
    """sha256 after the patch."""
    found: str = ""
    """sha256 now; empty where there is no file."""
    detail: str = ""
    reason: str = ""
    """A finer code than the state's where there is one (symlink, line-endings, half-edited …)."""


@dataclass(frozen=True, slots=True)
class PatchState:
    """One patch: its files and what follows from them."""

    name: str
    state: State
    files: tuple[FileState, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The whole target."""

    state: State
    patches: tuple[PatchState, ...]
    extra: tuple[FileState, ...]
    """The marker, and what an older set left."""

    @property
    def files(self) -> tuple[FileState, ...]:
        """All paths."""
        return (*(file for patch in self.patches for file in patch.files), *self.extra)


def judge(survey: Survey) -> Judgement:
    """What the target holds."""
    patches = tuple(
        _patch(
            patch.name,
            [_touched(survey, file.path, patch.name) for file in patch.files],
            [_overlay(survey, file.path, file.sha256, file.executable) for file in patch.overlay],
        )
        for patch in survey.patch_set.patches
    )
    touched = [file.state for patch in patches for file in patch.files if file.role == "patched"]
    bare = all(state in (State.NOT_APPLIED, State.ABSORBED, State.MISSING) for state in touched)
    extra = (_marker(survey, bare), *_older(survey))
    states = {patch.state for patch in patches}
    faults = {file.state for file in extra} - {State.APPLIED, State.NOT_APPLIED}
    if survey.wrong_version:
        state = State.WRONG_VERSION
    elif states == {State.APPLIED, State.NOT_APPLIED} or (
        states == {State.APPLIED} and extra[0].state != State.APPLIED
    ):
        state = max(faults | {State.INCOMPLETE}, key=_ORDER.index)
    else:
        state = max(states | faults or {State.APPLIED}, key=_ORDER.index)
    return Judgement(state, patches, extra)


def _patch(name: str, touched: list[FileState], overlay: list[FileState]) -> PatchState:
    files = (*touched, *overlay)
    states = {file.state for file in files}
    if states <= {State.APPLIED, State.NOT_APPLIED} and len(states) == 2:
        bare = all(file.state is State.NOT_APPLIED for file in touched)
        return PatchState(name, State.LEFTOVER if bare else State.INCOMPLETE, files)
    return PatchState(name, max(states, key=_ORDER.index), files)


def _touched(survey: Survey, path: str, patch: str) -> FileState:
    chain = survey.patch_set.chains[path]
    index = next(i for i, step in enumerate(chain) if step.patch == patch)
    step = chain[index]
    found = survey.found[path]
    if not isinstance(found, Entry):
        return _absent(path, "patched", step.after, found)
    have = position(found, chain)
    if have is not None:
        state = State.APPLIED if have > index else State.NOT_APPLIED
        mode = executable_at(chain, have)
        if mode not in (None, found.executable):
            return FileState(
                path, "patched", State.MODIFIED, step.after, found.sha256,
                f"the executable bit is {'missing' if mode else 'set'}", "mode",
            )  # fmt: skip
        return FileState(path, "patched", state, step.after, found.sha256)
    old = survey.recorded
    if old is not None and path in old.chains and position(found, old.chains[path]) is not None:
        return FileState(
            path,
            "patched",
            State.OTHER_SET,
            step.after,
            found.sha256,
            f"as patch set {old.patchset} leaves it",
        )
    return _strange(path, found, chain, step, ours=old is not None)


def _strange(path: str, found: Entry, chain: Chain, step: Step, *, ours: bool) -> FileState:
    """Bytes that no patch set explains: say in what way. *ours*: a marker says that a set was applied here."""
    from b12x_overlay.patching import fit  # only where something is wrong

    digests = {chain[0].before, *(one.after for one in chain)}
    if Entry(found.data.replace(b"\r\n", b"\n")).sha256 in digests:
        return FileState(
            path, "patched", State.MODIFIED, step.after, found.sha256,
            "line endings: the file has CRLF where LF is wanted", "line-endings",
        )  # fmt: skip
    data = found.data
    for later in reversed(chain[chain.index(step) + 1 :]):
        data = fit.take_off(later.diff, data)  # it may stand within this patch's lines
    fits = fit.fit_file(step.diff, data)
    kind = fit.summary(fits)
    if fits and kind is fit.Fit.ABSORBED and ours:
        detail = "edited after the patch was applied"
        return FileState(
            path, "patched", State.MODIFIED, step.after, found.sha256, detail, "edited"
        )
    if fits and kind is fit.Fit.ABSORBED:
        return FileState(
            path, "patched", State.ABSORBED, step.after, found.sha256,
            f"every hunk's result is there, first at line {fits[0].line}",
        )  # fmt: skip
    done = [one for one in fits if one.fit is fit.Fit.ABSORBED]
    if done:
        detail, reason = (
            f"half-edited: {len(done)} of {len(fits)} hunks of {step.patch} are in place",
            "half-edited",
        )
    elif kind is fit.Fit.CONFLICT:
        first = next(one for one in fits if one.fit is fit.Fit.CONFLICT)
        detail, reason = f"{path}:{first.line}: {first.detail}", "conflict"
    elif kind is fit.Fit.MOVED:
        first = next(one for one in fits if one.fit is fit.Fit.MOVED)
        detail, reason = f"{path}:{first.line}: a hunk of {step.patch} {first.detail}", "moved"
    else:
        detail, reason = "differs outside the patched lines", "modified"
    return FileState(path, "patched", State.MODIFIED, step.after, found.sha256, detail, reason)


def _overlay(survey: Survey, path: str, wanted: str, executable: bool) -> FileState:
    found = survey.found[path]
    if found is None:
        return FileState(path, "overlay", State.NOT_APPLIED, wanted)
    if isinstance(found, Blocked):
        return _absent(path, "overlay", wanted, found)
    if found.sha256 == wanted:
        if found.executable != executable:
            return FileState(
                path,
                "overlay",
                State.INCOMPLETE,
                wanted,
                found.sha256,
                "wrong executable bit",
                "mode",
            )
        return FileState(path, "overlay", State.APPLIED, wanted, found.sha256)
    old = survey.recorded
    if old is not None and old.overlay.get(path) == found.sha256:
        return FileState(
            path, "overlay", State.OTHER_SET, wanted, found.sha256, f"of patch set {old.patchset}"
        )
    return FileState(
        path, "overlay", State.MODIFIED, wanted, found.sha256, f"differs from overlay/{path}"
    )


def _marker(survey: Survey, bare: bool) -> FileState:
    found = survey.found[MARKER]
    wanted = Entry(survey.marker)
    if not isinstance(found, Entry):
        if found is None:
            return FileState(MARKER, "marker", State.NOT_APPLIED, wanted.sha256)
        return _absent(MARKER, "marker", wanted.sha256, found)
    if bare:
        return FileState(
            MARKER,
            "marker",
            State.STALE_MARKER,
            wanted.sha256,
            found.sha256,
            "it names a set, no patch is applied",
        )
    if found.sha256 == wanted.sha256:
        return FileState(MARKER, "marker", State.APPLIED, wanted.sha256, found.sha256)
    if survey.recorded is not None:
        return FileState(
            MARKER,
            "marker",
            State.OTHER_SET,
            wanted.sha256,
            found.sha256,
            f"names {survey.recorded.patchset}",
        )
    return FileState(
        MARKER, "marker", State.MODIFIED, wanted.sha256, found.sha256, "cannot be read"
    )


def _older(survey: Survey) -> list[FileState]:
    """What only the recorded set has."""
    old = survey.recorded
    if old is None:
        return []
    result = []
    current = {file.path for file in survey.patch_set.overlay}
    for path, digest in old.overlay.items():
        found = survey.entry(path)
        if path not in current and found is not None:
            same = found.sha256 == digest
            result.append(
                FileState(
                    path, "overlay", State.OTHER_SET if same else State.MODIFIED, "", found.sha256,
                    f"of patch set {old.patchset}, this one does not have it",
                )
            )  # fmt: skip
    for path, chain in old.chains.items():
        found = survey.entry(path)
        if (
            path not in survey.patch_set.chains
            and found is not None
            and position(found, chain) != 0
        ):
            state = State.MODIFIED if position(found, chain) is None else State.OTHER_SET
            result.append(
                FileState(
                    path, "patched", state, chain[0].before, found.sha256, f"of {old.patchset}"
                )
            )
    return result


def _absent(path: str, role: str, wanted: str, found: Blocked | None) -> FileState:
    if found is None:
        return FileState(path, role, State.MISSING, wanted)
    return FileState(path, role, State.BLOCKED, wanted, "", found.detail, found.reason)
