# SPDX-License-Identifier: Apache-2.0
"""Figures as text: what the terminal, the Markdown summary and the HTML page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from b12x_overlay.console import Console
from b12x_overlay.qualify.schema import Line, Result, VerdictKind

_COLOURS = {
    "pass": "green",
    "fail": "red",
    "inconclusive": "yellow",
    "incomplete": "yellow",
    "missing": "yellow",
}
_SHARE_DIGITS = 4


def figure(value: float | None, unit: str) -> str:
    """A value with the digits that mean something for its unit; a dash for none."""
    if value is None:
        return "–"
    if unit == "ratio":
        return f"{value:.3f}"
    if unit == "share":
        return f"{value:.{_SHARE_DIGITS}f}"
    if unit == "":
        return f"{value:g}"
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:,.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


def interval(line: Line) -> str:
    """The interval of a line, or nothing."""
    if line.low is None or line.high is None:
        return ""
    return f"{figure(line.low, line.unit)} … {figure(line.high, line.unit)}"


def shown(line: Line) -> str:
    """Value and unit of a line."""
    unit = "" if line.unit in ("ratio", "share", "") or line.value is None else f" {line.unit}"
    return figure(line.value, line.unit) + unit


def side_figure(line: Line, side: Literal["a", "b"]) -> str:
    """What a line that compares says of one side, or nothing."""
    value = line.a if side == "a" else line.b
    return "" if value is None else figure(value, "share" if line.unit == "share" else "rate")


def print_summary(console: Console, result: Result, files: Sequence[Path]) -> None:
    """The table of lines and where the files are: page, summary and result."""
    rows = [
        (line.title, shown(line), interval(line), line.limit or "", line.verdict.value)
        for line in result.lines
    ]
    console.table(
        rows,
        ("line", "value", "interval", "limit", "verdict"),
        lambda cell: _COLOURS.get(cell.strip(), ""),
    )
    for line in result.lines:
        if line.note and line.verdict in (
            VerdictKind.FAIL,
            VerdictKind.MISSING,
            VerdictKind.INCONCLUSIVE,
        ):
            console.say(f"  {line.title}: {line.note}")
    for block in result.blocks:
        for stop in block.stopped:
            console.say(
                f"  given up ({block.arm}, block {block.index + 1}): {stop.cell}: {stop.why}"
            )
    console.say()
    verdict = console.paint(result.verdict, _COLOURS.get(result.verdict, "bold"))
    console.say(
        f"verdict: {verdict}    reports: {files[0]}, {', '.join(file.name for file in files[1:])}"
    )
