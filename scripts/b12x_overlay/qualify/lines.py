# SPDX-License-Identifier: Apache-2.0
"""From samples to lines: one figure, its interval, its limit, its verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from b12x_overlay.qualify import statistics
from b12x_overlay.qualify.faults import DEGENERATION
from b12x_overlay.qualify.needle_counts import doubt, needle_counts
from b12x_overlay.qualify.promise_lines import promise_lines
from b12x_overlay.qualify.ratio_lines import ratio_lines
from b12x_overlay.qualify.schema import Arm, Block, DecodeSample, Line, Result, VerdictKind
from b12x_overlay.qualify.verdict import add_note, at_least, missing, overall


def judge(result: Result) -> None:
    """Fill the result's lines and verdict from its blocks."""
    lines: list[Line] = []
    arms = result.arms
    for arm in arms:
        blocks = [block for block in result.blocks if block.arm == arm.name]
        prefix = f"{arm.name.lower()}." if len(arms) > 1 else ""
        title = f"{arm.name}: " if len(arms) > 1 else ""
        limited = len(arms) == 1
        lines += _prefill_lines(result, blocks, prefix, title, limited)
        lines += _decode_lines(result, blocks, prefix, title, limited)
        lines += _needle_lines(result, arm, blocks, prefix, title, limited)
        lines += _guard_lines(result, blocks, prefix, title)
    if len(arms) > 1:
        lines += ratio_lines(result)
    lines += promise_lines(result)
    result.lines = lines
    result.verdict = overall(result)


def _prefill_lines(
    result: Result, blocks: list[Block], prefix: str, title: str, limited: bool
) -> list[Line]:
    if result.plan.prefill is None:
        return []
    lines = []
    for length in result.plan.prefill.lengths:
        samples = [
            sample for block in blocks for sample in block.prefill if sample.length == length
        ]
        limit = result.thresholds.single.prefill_tok_s_min.get(str(length)) if limited else None
        line = _rate(
            f"{prefix}prefill.{length}", f"{title}prefill, {length:,} tokens", "tok/s",
            [sample.tok_s for sample in samples], limit,
        )  # fmt: skip
        busy = sum(bool(sample.busy) for sample in samples)
        if busy:
            line.note = f"the server had other requests in {busy} of {len(samples)} repeats"
        lines.append(line)
    return lines


def _decode_lines(
    result: Result, blocks: list[Block], prefix: str, title: str, limited: bool
) -> list[Line]:
    if result.plan.decode is None:
        return []
    lines = []
    single = result.thresholds.single
    for streams in result.plan.decode.concurrency:
        samples = [
            sample for block in blocks for sample in block.decode if sample.concurrency == streams
        ]

        def values(
            pick: Callable[[DecodeSample], float | None], samples: list[DecodeSample] = samples
        ) -> list[float]:
            return [value for value in map(pick, samples) if value is not None]

        name, text = f"{prefix}decode.{streams}", f"{title}decode C{streams}"
        line = _rate(f"{name}.tok_s", text, "tok/s", values(lambda sample: sample.tok_s),
                     single.decode_tok_s_min.get(str(streams)) if limited else None)  # fmt: skip
        if any(sample.client_busy > 0.8 for sample in samples):
            line.note = "this program used more than 0.8 of a core: the figure may be its own limit"
        lines.append(line)
        steps = values(lambda sample: sample.steps_s)
        if steps:
            lines.append(_rate(f"{name}.steps_s", f"{text}, engine steps", "steps/s", steps, None))
        accepted = values(lambda sample: sample.accepted_per_step)
        if accepted:
            lines.append(_rate(f"{name}.accepted", f"{text}, accepted tokens per step", "tokens", accepted,
                               single.accepted_per_step_min if limited else None))  # fmt: skip
    return lines


def _needle_lines(
    result: Result, arm: Arm, blocks: list[Block], prefix: str, title: str, limited: bool
) -> list[Line]:
    if result.plan.needle is None:
        return []
    counts = needle_counts(blocks)
    limit = result.thresholds.single.needle_exact_min if limited else None
    name, text = f"{prefix}needle.exact", f"{title}needle checksum, share EXACT"
    total = sum(answered for _, answered in counts)
    if not total:
        return [missing(name, text, "share", at_least_text(limit))]
    interval = statistics.share(
        sum(exact for exact, _ in counts), total, result.thresholds.confidence
    )
    line = at_least(
        name, text, "share", replace(interval, undecided=doubt(result, arm, counts)), limit
    )
    add_note(line, "per run: " + ", ".join(f"{exact} of {answered}" for exact, answered in counts))
    return [line]


def _guard_lines(result: Result, blocks: list[Block], prefix: str, title: str) -> list[Line]:
    guard = result.thresholds.guard
    faults = [fault for block in blocks for fault in block.faults]
    groups = (
        (
            "degenerate",
            "degenerate answers",
            [f for f in faults if f.kind in DEGENERATION],
            guard.degenerate_max,
        ),
        (
            "faults",
            "failed requests",
            [f for f in faults if f.kind not in DEGENERATION],
            guard.faults_max,
        ),
    )
    asked = any(block.prefill or block.decode or block.needle or block.faults for block in blocks)
    lines = []
    for name, text, found, limit in groups:
        if not asked:  # none of nothing is no evidence
            lines.append(missing(f"{prefix}guard.{name}", f"{title}{text}", "", f"<= {limit}"))
            continue
        count = sum(fault.count for fault in found)
        kinds: dict[str, int] = {}
        for fault in found:
            kinds[fault.kind.value] = kinds.get(fault.kind.value, 0) + fault.count
        lines.append(
            Line(
                id=f"{prefix}guard.{name}", title=f"{title}{text}", unit="", value=count,
                basis="count over the whole run", limit=f"<= {limit}",
                verdict=VerdictKind.PASS if count <= limit else VerdictKind.FAIL,
                note=", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items())) or None,
            )
        )  # fmt: skip
    return lines


def at_least_text(limit: float | None) -> str | None:
    """A lower limit as text."""
    return None if limit is None else f">= {limit:g}"


def _rate(name: str, title: str, unit: str, values: list[float], limit: float | None) -> Line:
    if not values:
        return missing(name, title, unit, at_least_text(limit))
    middle = statistics.spread(values)
    interval = statistics.Interval(
        middle.median, middle.low, middle.high, f"median and range of {middle.count}"
    )
    return at_least(name, title, unit, interval, limit)
