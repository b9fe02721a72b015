# SPDX-License-Identifier: Apache-2.0
"""The needle task: a long record list with hidden facts and a checksum over them, and the tool to report both.

The sum's last digits come from a chain of near-ties, so identical requests differ only by the rounding that depends
on how they were batched: the share of EXACT answers measures numeric noise, not the model's quality.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from b12x_overlay.qualify.settings import NeedlePlan

TOOL = "submit_reading"
CHECKSUM = "checksum"
_NAMES = (
    "amber", "birch", "cobalt", "delta", "ebony", "fjord", "grove", "haven",
    "indigo", "jasper", "kestrel", "linden", "maple", "nimbus", "onyx", "pearl",
)  # fmt: skip
_SYSTEM = "You read registers exactly and answer only through the tool you are given."


@dataclass(frozen=True)
class NeedleTask:
    """One generated task."""

    prompt: str
    facts: dict[str, int]
    """Name to value, in the order of their weights 1, 2, 3, ..."""

    @property
    def checksum(self) -> int:
        """1 x first fact + 2 x second + ..."""
        return sum(weight * value for weight, value in enumerate(self.facts.values(), start=1))

    def messages(self) -> list[dict[str, str]]:
        """The chat to send."""
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self.prompt}]

    def tool(self) -> dict[str, Any]:
        """The one tool: a whole number per fact and the checksum, all required, nothing else allowed."""
        properties = {name: {"type": "integer"} for name in (*self.facts, CHECKSUM)}
        return {
            "type": "function",
            "function": {
                "name": TOOL,
                "description": "Hand in the certified readings and their checksum. Call it exactly once.",
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                },
            },
        }


def make_task(plan: NeedlePlan, variant: int = 0) -> NeedleTask:
    """The task number *variant* of *plan*; the same plan always gives the same text.

    Raises:
        ValueError: the number of positions is neither 0 nor the number of facts.
    """
    positions = plan.fact_positions
    if not positions:
        positions = tuple((place + 0.5) / plan.facts for place in range(plan.facts))
    if len(positions) != plan.facts:
        raise ValueError(f"{len(positions)} positions given for {plan.facts} facts")
    rng = random.Random(f"{plan.task_seed}/{variant}")
    names = list(_NAMES[: plan.facts])
    facts = {name: rng.randint(100, 999) for name in names}
    lines = [_record(plan.task_seed, variant, number) for number in range(1, plan.records + 1)]
    for name, share in sorted(
        zip(names, positions, strict=True), key=lambda pair: pair[1], reverse=True
    ):
        lines.insert(
            round(share * plan.records),
            f"NOTE the certified reading of {name.upper()} is {facts[name]}.",
        )
    formula = " + ".join(f"{weight} x {name.upper()}" for weight, name in enumerate(names, start=1))
    prompt = "\n".join(
        [
            f"REGISTER {plan.task_seed}/{variant}",
            f"It has {plan.records} measurements and {plan.facts} notes. Measurements are of no interest.",
            "Only a line that begins with NOTE certifies a reading.",
            "",
            *lines,
            "",
            "END OF REGISTER",
            "",
            f"1. Find the certified readings of {', '.join(name.upper() for name in names)}.",
            f"2. Compute CHECKSUM = {formula}.",
            f"3. Call {TOOL} exactly once with the readings and the checksum as whole numbers.",
            "4. Write nothing else.",
        ]
    )
    return NeedleTask(prompt, facts)


def _record(seed: str, variant: int, number: int) -> str:
    digest = hashlib.sha256(f"{seed}|{variant}|{number}".encode()).hexdigest()
    load = int(digest[32:40], 16) % 100_000
    return f"{number:05d} unit {digest[:12]} load {load:05d} steady"
