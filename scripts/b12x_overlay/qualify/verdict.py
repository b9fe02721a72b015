# SPDX-License-Identifier: Apache-2.0
"""One rule for all limits: the whole interval decides, or nothing does."""

from __future__ import annotations

from typing import Literal

from b12x_overlay.qualify.schema import Line, Result, VerdictKind
from b12x_overlay.qualify.statistics import Interval


def at_least(name: str, title: str, unit: str, interval: Interval, limit: float | None) -> Line:
    """A line that passes if the whole interval reaches *limit* and fails if none of it does.

    An interval that says why it may not decide does neither; the line's note is its reason.
    """
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    if limit is None:
        verdict = VerdictKind.INFO
    elif interval.undecided:
        verdict = VerdictKind.INCONCLUSIVE
    elif high < limit:
        verdict = VerdictKind.FAIL
    elif low >= limit and interval.low is not None:
        verdict = VerdictKind.PASS
    else:
        verdict = VerdictKind.INCONCLUSIVE
    return Line(
        id=name, title=title, unit=unit, value=interval.value, low=interval.low, high=interval.high,
        basis=interval.basis, limit=None if limit is None else f">= {limit:g}", verdict=verdict,
        note=interval.undecided,
    )  # fmt: skip


def add_note(line: Line, text: str) -> None:
    """Append *text* to what the line says already."""
    line.note = f"{line.note}; {text}" if line.note else text


def missing(name: str, title: str, unit: str, limit: str | None) -> Line:
    """A line that was asked for and could not be measured."""
    return Line(
        id=name,
        title=title,
        unit=unit,
        value=None,
        basis="not measured",
        limit=limit,
        verdict=VerdictKind.MISSING,
    )


def overall(result: Result) -> Literal["pass", "fail", "inconclusive", "incomplete"]:
    """fail before incomplete before inconclusive before pass."""
    verdicts = {line.verdict for line in result.lines}
    if VerdictKind.FAIL in verdicts:
        return "fail"
    if result.status != "complete" or VerdictKind.MISSING in verdicts or not result.lines:
        return "incomplete"
    return "inconclusive" if VerdictKind.INCONCLUSIVE in verdicts else "pass"
