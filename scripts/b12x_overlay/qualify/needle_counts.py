# SPDX-License-Identifier: Apache-2.0
"""Counts of needle outcomes, and whether the answers may be counted as independent ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from b12x_overlay.qualify import statistics
from b12x_overlay.qualify.schema import Arm, Block, NeedleOutcome, NeedleRun, Result

_CHANCE = 0.01
"""Probability under which runs are said to differ."""


def needle_counts(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """Per run: EXACT answers, and answers at all (failed requests are no answers)."""
    counts = [outcome_counts([run]) for block in blocks for run in block.needle]
    pairs = [(c[NeedleOutcome.EXACT], c.total() - c[NeedleOutcome.ERROR]) for c in counts]
    return [pair for pair in pairs if pair[1]]


def shares_prefills(result: Result, arm: Arm) -> bool:
    """Whether the prefix cache may have given one prefill to many answers, which are then no independent ones."""
    plan, settings = result.plan.needle, arm.identity.settings if arm.identity else {}
    if settings.get("enable_prefix_caching") == "False":
        return False
    return plan is not None and not (plan.salt == "request" and arm.abilities.get("extras"))


def doubt(result: Result, arm: Arm, counts: Sequence[tuple[int, int]]) -> str | None:
    """Why an interval over all answers of *arm* together would be too narrow; None if it would not."""
    reasons = []
    if shares_prefills(result, arm):
        reasons.append(
            "the answers of a run may share one prefill (--needle-salt run, or a server that takes no cache_salt), so "
            "they are no independent ones"
        )
    p = statistics.differ(counts)
    if p is not None and p < _CHANCE:
        which = f" of {arm.name}" if len(result.arms) > 1 else ""
        reasons.append(
            f"runs{which} differ by more than chance (p = {p:.2g}), the interval is too narrow"
        )
    return "; ".join(reasons) or None


def cold_needle_tokens(result: Result, arm: Arm, block: Block) -> int:
    """Prompt tokens of a block's needle answers; 0 where the prefix cache may have served some of them."""
    if shares_prefills(result, arm):
        return 0
    return sum(
        (run.prompt_tokens or 0)
        * sum(answer.outcome != NeedleOutcome.ERROR for answer in run.answers)
        for run in block.needle
    )


def outcome_counts(runs: Iterable[NeedleRun]) -> Counter[NeedleOutcome]:
    """How often each outcome occurred in *runs*."""
    return Counter(answer.outcome for run in runs for answer in run.answers)
