# SPDX-License-Identifier: Apache-2.0
"""What the user sees: the table, the reasons, the next step; the same as JSON."""

from __future__ import annotations

from typing import Any

from b12x_overlay.console import Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import manifest
from b12x_overlay.patching.engine import Outcome
from b12x_overlay.patching.patchset import PatchSet
from b12x_overlay.patching.state import FileState, State

_COLOUR = {State.APPLIED: "green", State.NOT_APPLIED: "yellow"}

_ADVICE = {
    State.WRONG_VERSION: "install or check out vLLM {version}, or see 'Moving to another vLLM version' in README.md",
    State.ABSORBED: "upstream has this patch already: see 'If upstream fixes it' in README.md",
    State.MODIFIED: "restore the file of vLLM {version} (git checkout -- FILE, or pip install --force-reinstall "
    "--no-deps vllm=={version}), then run apply again; keep a copy of your own edit first",
    State.MISSING: "the tree lacks files of vLLM {version}: reinstall or unpack it again",
    State.BLOCKED: "replace the link by a copy of the file, or give the real folder as --target",
}
_UNREADABLE = "make {path} readable for this user, or run as its owner"


def show(
    console: Console, outcome: Outcome, patch_set: PatchSet, target: dict[str, Any], next_step: str
) -> None:
    """Print one verb's outcome."""
    document = as_json(outcome, patch_set, target, next_step)
    console.json(document)
    version = f" ({target['version']})" if target["version"] else ""
    console.say(f"{target['kind']} {target['path']}{version}, patch set {document['patchset']}")
    rows = [
        (patch.name, _files(patch.files), str(patch.state)) for patch in outcome.judgement.patches
    ]
    console.table(rows, ("patch", "files", "state"), _colour)
    for line in _details(console, outcome):
        console.say(line)
    for note in outcome.notes:
        console.say(f"note: {note}")
    if outcome.code is ExitCode.REFUSED:
        console.error(f"refused, nothing was changed: {_refusal(outcome, patch_set, target)}")
    else:
        console.say(_headline(outcome))
    console.say(f"next: {next_step or advice(outcome, patch_set)}")


def as_json(
    outcome: Outcome, patch_set: PatchSet, target: dict[str, Any], next_step: str
) -> dict[str, Any]:
    """The machine output of apply, revert, status and verify."""
    judgement = outcome.judgement
    return {
        "command": outcome.verb,
        "target": target,
        "patchset": manifest.patchset_id(patch_set),
        "outcome": outcome.outcome,
        "exit": int(outcome.code),
        "state": judgement.state.reason,
        "patches": [
            {
                "name": patch.name,
                "state": patch.state.reason,
                "files": [_file(file) for file in patch.files],
            }
            for patch in judgement.patches
        ],
        "extra": [_file(file) for file in judgement.extra],
        "changed": outcome.changed,
        "notes": outcome.notes,
        "next": next_step or advice(outcome, patch_set),
    }


def settled_by_apply(outcome: Outcome) -> bool:
    """Whether running apply is all that the target's state asks for."""
    return not outcome.problems and outcome.judgement.state not in _ADVICE


def advice(outcome: Outcome, patch_set: PatchSet) -> str:
    """What to do about the target's state."""
    state = outcome.judgement.state
    if outcome.code is ExitCode.OK:
        return "nothing to do"
    if state is State.WRONG_VERSION:
        return _ADVICE[state].format(version=patch_set.pin.version)
    bad = outcome.problems or [file for file in outcome.judgement.files if file.state in _ADVICE]
    state = max((file.state for file in bad), key=list(State).index)
    foreign = [file.path for file in bad if file.role == "overlay" and file.reason != "unreadable"]
    if foreign and all(file.role == "overlay" or file.state is not State.BLOCKED for file in bad):
        return (
            f"{foreign[0]} is not this set's file: move it away (keep a copy if it is yours; from a git "
            "checkout, export takes your edit over), then run the command again"
        )
    unreadable = [file.path for file in bad if file.reason == "unreadable"]
    if unreadable:
        return _UNREADABLE.format(path=unreadable[0])
    return _ADVICE.get(state, "look at the named files").format(version=patch_set.pin.version)


def _files(files: tuple[FileState, ...]) -> str:
    patched = [file for file in files if file.role == "patched"]
    overlay = len(files) - len(patched)
    text = patched[0].path if len(patched) == 1 else f"{len(patched)} files"
    return f"{text} + {overlay} overlay" if overlay else text


def _details(console: Console, outcome: Outcome) -> list[str]:
    """One line for each file that keeps the target from being applied or original as a whole; all with -v."""
    judgement = outcome.judgement
    ordinary = {State.APPLIED, State.NOT_APPLIED}
    if judgement.state is State.INCOMPLETE:
        ordinary = {State.APPLIED}
    owned = [(file, patch.name) for patch in judgement.patches for file in patch.files]
    owned += [(file, file.role) for file in judgement.extra]
    return [
        _line(file, owner)
        for file, owner in owned
        if console.verbosity > 0 or file.state not in ordinary
    ]


def _line(file: FileState, owner: str) -> str:
    digests = (
        f" (sha256 wanted {file.wanted[:12]}, found {file.found[:12] or 'none'})"
        if file.wanted
        else ""
    )
    detail = f": {file.detail}" if file.detail else ""
    return f"  {owner}: {file.path}: {file.state}{detail}{digests}"


def _headline(outcome: Outcome) -> str:
    if not outcome.changed:
        return outcome.outcome
    count = len(outcome.changed)
    return f"{outcome.outcome} ({count} file{'' if count == 1 else 's'})"


def _refusal(outcome: Outcome, patch_set: PatchSet, target: dict[str, Any]) -> str:
    if outcome.judgement.state is State.WRONG_VERSION:
        return f"{target['path']} is vLLM {target['version']}, the patch set is for {patch_set.pin.version}"
    if not outcome.problems:
        return str(outcome.judgement.state)
    first = outcome.problems[0]
    more = f" (and {len(outcome.problems) - 1} more)" if len(outcome.problems) > 1 else ""
    return f"{first.path} is {first.state}{': ' + first.detail if first.detail else ''}{more}"


def _file(file: FileState) -> dict[str, str]:
    return {
        "path": file.path,
        "role": file.role,
        "state": file.state.reason,
        "reason": file.reason or file.state.reason,
        "detail": file.detail,
        "wanted": file.wanted,
        "found": file.found,
    }


def _colour(cell: str) -> str:
    return _COLOUR.get(State(cell), "red") if cell in set(State) else ""
