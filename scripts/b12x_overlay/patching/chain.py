# SPDX-License-Identifier: Apache-2.0
"""Walks a file along its chain: which step its bytes are at, the bytes before all patches, the bytes after all."""

from __future__ import annotations

from b12x_overlay.patching import hunks
from b12x_overlay.patching.diff import FileDiff
from b12x_overlay.patching.entry import Entry
from b12x_overlay.patching.patchset import Chain, Step, sha256


class ChainError(Exception):
    """A diff does not turn the pinned bytes into the pinned bytes: patches/ is inconsistent."""


def executable_at(chain: Chain, step: int) -> bool | None:
    """The executable bit that the chain asks for after *step* patches; None where it asks for none."""
    for diff in reversed([one.diff for one in chain[:step]]):
        if diff.new_executable is not None:
            return diff.new_executable
    return next(
        (one.diff.old_executable for one in chain[step:] if one.diff.old_executable is not None),
        None,
    )


def position(entry: Entry, chain: Chain) -> int | None:
    """How many of the chain's patches *entry* has, judged by its bytes (and its mode where the chain changes it)."""
    digests = [chain[0].before, *(step.after for step in chain)]
    same = [step for step, digest in enumerate(digests) if digest == entry.sha256]
    for step in reversed(same):
        if executable_at(chain, step) in (None, entry.executable):
            return step
    return same[0] if same else None


def at(entry: Entry, chain: Chain, have: int, want: int) -> Entry:
    """*entry*, which has *have* of the chain's patches, with *want* of them.

    Every link is checked against its sha256, in both directions.

    Raises:
        ChainError: a link does not fit its digest.
    """
    data = entry.data
    for step in chain[have:want]:
        data = _link(step, data, reverse=False)
    for step in reversed(chain[want:have]):
        data = _link(step, data, reverse=True)
    mode = executable_at(chain, want)
    return Entry(data, entry.executable if mode is None else mode)


def _link(step: Step, data: bytes, *, reverse: bool) -> bytes:
    result = run(step.diff, data, reverse=reverse)
    wanted = step.before if reverse else step.after
    if sha256(result) != wanted:
        raise ChainError(
            f"{step.diff.path}: {'taking off' if reverse else 'applying'} {step.patch} gives sha256 "
            f"{sha256(result)[:12]}, the pin file says {wanted[:12]}: patches/{step.patch}.patch is truncated or was "
            "edited; restore it with git, or run scripts/apply-patches export"
        )
    return result


def run(diff: FileDiff, data: bytes, *, reverse: bool) -> bytes:
    """Apply or reverse one diff.

    Raises:
        ChainError: it does not fit.
    """
    try:
        return hunks.reverse(diff, data) if reverse else hunks.apply(diff, data)
    except hunks.HunkError as error:
        raise ChainError(str(error)) from error
