# SPDX-License-Identifier: Apache-2.0
"""Join two finished runs into one A/B result."""

from __future__ import annotations

from datetime import UTC, datetime

from b12x_overlay.qualify.errors import RefusedError
from b12x_overlay.qualify.schema import Arm, ArmName, Block, Result
from b12x_overlay.qualify.settings import DecodePlan, NeedlePlan, Plan, PrefillPlan


def join(a: Result, b: Result) -> Result:
    """An A/B result of what both measured in the same way; what they did not is left out with a note.

    Raises:
        RefusedError: a result already has two sides, or nothing was measured in the same way by both.
    """
    for side, result in (("A", a), ("B", b)):
        if len(result.arms) != 1:
            raise RefusedError(f"{side} is itself a comparison; give the result of a single run")
    notes: list[str] = []
    prefill, decode = _prefill(a.plan, b.plan, notes), _decode(a.plan, b.plan, notes)
    needle = _needle(a.plan, b.plan, notes)
    if prefill is None and decode is None and needle is None:
        raise RefusedError("the two results have nothing in common:\n  " + "\n  ".join(notes))
    model_a, model_b = (
        result.arms[0].identity.model if result.arms[0].identity else "?" for result in (a, b)
    )
    if model_a != model_b:
        notes.append(f"different models: {model_a} and {model_b}")
    for side, result in (("A", a), ("B", b)):
        if result.status != "complete":
            notes.append(f"{side} is a partial result")
    blocks = _blocks(a, "A", 0) + _blocks(b, "B", len(a.blocks))
    return Result(
        run_id=f"{a.run_id}-{b.run_id}", tool=b.tool, created=datetime.now(UTC), updated=datetime.now(UTC),
        status="complete" if a.status == b.status == "complete" else "partial",
        plan=Plan(order="".join(block.arm for block in blocks), prefill=prefill, decode=decode, needle=needle),
        thresholds=b.thresholds, arms=[_arm(a, "A"), _arm(b, "B")], blocks=blocks, notes=notes,
    )  # fmt: skip


def _note_one_sided(part: str, a: object, b: object, notes: list[str]) -> None:
    if a is not b:  # neither measured it: nothing is left out
        notes.append(f"{part} is left out: only one side measured it")


def _prefill(a: Plan, b: Plan, notes: list[str]) -> PrefillPlan | None:
    if a.prefill is None or b.prefill is None:
        _note_one_sided("prefill", a.prefill, b.prefill, notes)
        return None
    lengths = tuple(length for length in a.prefill.lengths if length in b.prefill.lengths)
    if not lengths:
        notes.append("prefill is left out: no common length")
        return None
    if a.prefill.answer_tokens != b.prefill.answer_tokens:
        notes.append("prefill is left out: other request settings")
        return None
    return a.prefill.model_copy(update={"lengths": lengths})


def _decode(a: Plan, b: Plan, notes: list[str]) -> DecodePlan | None:
    if a.decode is None or b.decode is None:
        _note_one_sided("decode", a.decode, b.decode, notes)
        return None
    streams = tuple(number for number in a.decode.concurrency if number in b.decode.concurrency)
    if not streams:
        notes.append("decode is left out: no common concurrency")
        return None
    if any(
        getattr(a.decode, name) != getattr(b.decode, name)
        for name in ("max_tokens", "temperature", "ignore_eos")
    ):
        notes.append("decode is left out: other request settings")
        return None
    return a.decode.model_copy(update={"concurrency": streams})


def _needle(a: Plan, b: Plan, notes: list[str]) -> NeedlePlan | None:
    if a.needle is None or b.needle is None:
        _note_one_sided("needle", a.needle, b.needle, notes)
        return None
    free = {"runs", "requests"}  # more answers narrow the interval, they do not change the task
    if a.needle.model_dump(exclude=free) != b.needle.model_dump(exclude=free):
        notes.append("needle is left out: other parameters")
        return None
    return a.needle


def _arm(result: Result, name: ArmName) -> Arm:
    label = result.arms[0].label
    return result.arms[0].model_copy(
        update={"name": name, "label": name if label in ("A", "B") else label}
    )


def _blocks(result: Result, name: ArmName, first: int) -> list[Block]:
    return [
        block.model_copy(update={"arm": name, "index": first + number})
        for number, block in enumerate(result.blocks)
    ]
