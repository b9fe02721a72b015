# SPDX-License-Identifier: Apache-2.0
"""The lines of an A/B: B over A with intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from b12x_overlay.qualify import statistics
from b12x_overlay.qualify.needle_counts import doubt, needle_counts
from b12x_overlay.qualify.schema import ArmName, Block, DecodeSample, Line, Result
from b12x_overlay.qualify.verdict import add_note, at_least, missing

Pick = Callable[[Block], list[float]]


def ratio_lines(result: Result) -> list[Line]:
    """Prefill per length, decode per concurrency, needle difference."""
    limits = result.thresholds.ratios(result.question)
    lines = []
    for length in result.plan.prefill.lengths if result.plan.prefill else ():
        title = f"prefill, {length:,} tokens"
        pick = _prefill_picker(length)
        lines.append(_ratio(result, f"ab.prefill.{length}", title, limits.prefill_ratio_min, pick))
    for streams in result.plan.decode.concurrency if result.plan.decode else ():
        lines += _decode(result, streams, limits.decode_ratio_min, limits.accepted_ratio_min)
    if result.plan.needle:
        lines.append(_needle(result, limits.needle_difference_min))
    return lines


def _prefill_picker(length: int) -> Pick:
    return lambda block: [sample.tok_s for sample in block.prefill if sample.length == length]


def _decode(
    result: Result, streams: int, limit: float | None, accepted_limit: float | None
) -> list[Line]:
    """With speculation the limit applies to steps/s, since tok/s also moves with the sampled text."""

    def picker(pick: Callable[[DecodeSample], float | None]) -> Pick:
        return lambda block: [
            value
            for s in block.decode
            if s.concurrency == streams and (value := pick(s)) is not None
        ]

    accepted, steps = picker(lambda s: s.accepted_per_step), picker(lambda s: s.steps_s)
    speculates = all(any(accepted(block) for block in side(result, arm)) for arm in ("A", "B"))
    name, title = f"ab.decode.{streams}", f"decode C{streams}"
    rate = _ratio(
        result,
        f"{name}.tok_s",
        f"{title}, tokens",
        None if speculates else limit,
        picker(lambda s: s.tok_s),
    )
    if not speculates:
        return [rate]
    add_note(rate, "moves with acceptance, which moves with the sampled text; compare engine steps")
    return [
        _ratio(result, f"{name}.steps_s", f"{title}, engine steps", limit, steps),
        _ratio(
            result,
            f"{name}.accepted",
            f"{title}, accepted tokens per step",
            accepted_limit,
            accepted,
        ),
        rate,
    ]


def _needle(result: Result, limit: float | None) -> Line:
    name, title = "ab.needle.difference", "needle checksum, share EXACT, B minus A"
    sums = []
    doubts = []
    for arm in result.arms:
        counts = needle_counts(side(result, arm.name))
        doubts.append(doubt(result, arm, counts))
        sums.append((sum(exact for exact, _ in counts), sum(total for _, total in counts)))
    if not all(total for _, total in sums):
        return missing(name, title, "share", None if limit is None else f">= {limit:g}")
    interval = statistics.share_difference(sums[0], sums[1], result.thresholds.confidence)
    why = "; ".join(dict.fromkeys(filter(None, doubts))) or None
    line = at_least(name, title, "share", replace(interval, undecided=why), limit)
    line.a, line.b = (exact / total for exact, total in sums)
    return line


def _ratio(result: Result, name: str, title: str, limit: float | None, pick: Pick) -> Line:
    a, b = ([pick(block) for block in side(result, arm)] for arm in ("A", "B"))
    interval = statistics.ratio(a, b, result.thresholds.confidence)
    title = f"{title}, B / A"
    if interval is None:
        return missing(name, title, "ratio", None if limit is None else f">= {limit:g}")
    line = at_least(name, title, "ratio", interval, limit)
    if interval.sides:
        line.a, line.b = interval.sides
    return line


def side(result: Result, arm: ArmName) -> list[Block]:
    """The blocks of one arm."""
    return [block for block in result.blocks if block.arm == arm]
