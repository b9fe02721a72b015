# SPDX-License-Identifier: Apache-2.0
"""Counts of needle outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from b12x_overlay.qualify.schema import Block, NeedleOutcome, NeedleRun


def needle_counts(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """Per run: EXACT answers, and answers at all (failed requests are no answers)."""
    counts = [outcome_counts([run]) for block in blocks for run in block.needle]
    pairs = [(c[NeedleOutcome.EXACT], c.total() - c[NeedleOutcome.ERROR]) for c in counts]
    return [pair for pair in pairs if pair[1]]


def outcome_counts(runs: Iterable[NeedleRun]) -> Counter[NeedleOutcome]:
    """How often each outcome occurred in *runs*."""
    return Counter(answer.outcome for run in runs for answer in run.answers)
