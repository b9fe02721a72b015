# SPDX-License-Identifier: Apache-2.0
"""Results made of given figures, so that what is judged is known exactly and no server is needed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from b12x_overlay.qualify.lines import judge
from b12x_overlay.qualify.schema import (
    Arm,
    Block,
    DecodeSample,
    Identity,
    Line,
    NeedleAnswer,
    NeedleOutcome,
    NeedleRun,
    PrefillSample,
    Result,
)
from b12x_overlay.qualify.settings import (
    DEFAULT_THRESHOLDS,
    DecodePlan,
    NeedlePlan,
    Plan,
    PrefillPlan,
    Thresholds,
    load_thresholds,
)

LENGTH, STREAMS = 2048, 2
ABILITIES = dict.fromkeys(
    ("completions", "chat", "extras", "tokenizer", "metrics", "speculates"), True
)
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def prefill(*tok_s: float, **changes: Any) -> list[PrefillSample]:
    """Samples of `LENGTH` tokens."""
    values: dict[str, Any] = {
        "length": LENGTH, "prompt_tokens": LENGTH, "counted_by": "tokenizer", "busy": False,
    }  # fmt: skip
    return [
        PrefillSample(**values | {"tok_s": rate, "ttft_s": LENGTH / rate} | changes)
        for rate in tok_s
    ]


def decode(*tok_s: float, **changes: Any) -> list[DecodeSample]:
    """Windows of `STREAMS` streams."""
    values: dict[str, Any] = {
        "concurrency": STREAMS, "seconds": 10.0, "answers_restarted": 0, "longest_gap_s": 0.1, "client_busy": 0.1,
    }  # fmt: skip
    return [
        DecodeSample(**values | {"tok_s": rate, "tokens": int(10 * rate)} | changes)
        for rate in tok_s
    ]


def needle(*counts: tuple[int, int], prompt_tokens: int = 8000) -> list[NeedleRun]:
    """One run per pair of EXACT answers and all answers."""

    def outcome(index: int, exact: int) -> NeedleOutcome:
        return NeedleOutcome.EXACT if index < exact else NeedleOutcome.WRONG_SUM

    return [
        NeedleRun(
            run=number,
            prompt_tokens=prompt_tokens,
            answers=[
                NeedleAnswer(index=i, outcome=outcome(i, exact), why=None) for i in range(total)
            ],
        )
        for number, (exact, total) in enumerate(counts)
    ]


def block(arm: str, **parts: Any) -> Block:
    """A finished block; `made` sets its place."""
    return Block(**{"arm": arm, "index": 0, "started": MOMENT, "done": True} | parts)


def arm(name: str, **changes: Any) -> Arm:
    """A side that was reached."""
    values: dict[str, Any] = {
        "name": name, "label": name, "abilities": ABILITIES, "identity": Identity(model="m", sources=["/v1/models"]),
    }  # fmt: skip
    return Arm(**values | changes)


def stated(*sources: str, **values: Any) -> Identity:
    """An identity read from *sources* as well."""
    return Identity(model="m", sources=["/v1/models", *sources], **values)


def limits(**changes: Any) -> Thresholds:
    """The shipped limits, with changes."""
    return load_thresholds(DEFAULT_THRESHOLDS).model_copy(update=changes)


def made(
    *blocks: Block, arms: list[Arm] | None = None, salt: str = "request", **fields: Any
) -> Result:
    """A complete, judged result of *blocks*; its plan has the parts that they have."""
    for index, one in enumerate(blocks):
        one.index = index
    plan = Plan(
        order="".join(one.arm for one in blocks),
        prefill=PrefillPlan(lengths=(LENGTH,)) if any(one.prefill for one in blocks) else None,
        decode=DecodePlan(concurrency=(STREAMS,)) if any(one.decode for one in blocks) else None,
        needle=NeedlePlan(salt=salt) if any(one.needle for one in blocks) else None,
    )
    names = sorted({one.arm for one in blocks})
    values: dict[str, Any] = {
        "run_id": "r", "tool": {}, "created": MOMENT, "updated": MOMENT, "status": "complete", "plan": plan,
        "thresholds": limits(), "arms": arms or [arm(name) for name in names], "blocks": list(blocks),
    }  # fmt: skip
    result = Result(**values | fields)
    judge(result)
    return result


def line(result: Result, name: str) -> Line:
    """The line of that id."""
    return next(line for line in result.lines if line.id == name)


def has(result: Result, name: str) -> bool:
    """Whether there is such a line."""
    return any(line.id == name for line in result.lines)
