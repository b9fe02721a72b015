# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG text for inlining: every sample as a point, medians as lines, intervals as bars."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from b12x_overlay.qualify.needle_counts import outcome_counts
from b12x_overlay.qualify.ratio_lines import side
from b12x_overlay.qualify.schema import Block, DecodeSample, NeedleOutcome, Result
from b12x_overlay.qualify.statistics import spread

_ARM_COLOURS = {"A": "#3b6ea8", "B": "#c8662b"}
_OUTCOME_COLOURS = {
    NeedleOutcome.EXACT: "#4f9d69",
    NeedleOutcome.NEAR_MISS: "#e3b341",
    NeedleOutcome.WRONG_SUM: "#d9822b",
    NeedleOutcome.WRONG_FACTS: "#c0504d",
    NeedleOutcome.FAIL: "#7d3c98",
    NeedleOutcome.TRUNC: "#8d99ae",
    NeedleOutcome.ERROR: "#333333",
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


@dataclass(frozen=True)
class Plot:
    """One plot of the page."""

    title: str
    svg: str
    text: str
    """What it shows, for those who cannot see it."""


def plots(result: Result) -> list[Plot]:
    """The plots that the result has data for."""
    with matplotlib.rc_context(_STYLE):
        made = [
            _ratios(result),
            _by_number(result, "Prefill", "prompt tokens", "tokens/s", _prefill_points, log=True),
            _by_number(result, "Decode", "streams", "tokens/s", _decode_points(lambda s: s.tok_s)),
            _by_number(result, "Decode: engine steps", "streams", "steps/s", _decode_points(lambda s: s.steps_s)),
            _by_number(
                result, "Decode: accepted tokens per step", "streams", "tokens",
                _decode_points(lambda s: s.accepted_per_step),
            ),
            _needle(result),
        ]  # fmt: skip
    return [plot for plot in made if plot]


Points = Callable[[Sequence[Block]], dict[int, list[float]]]


def _prefill_points(blocks: Sequence[Block]) -> dict[int, list[float]]:
    points: dict[int, list[float]] = {}
    for block in blocks:
        for sample in block.prefill:
            points.setdefault(sample.length, []).append(sample.tok_s)
    return points


def _decode_points(pick: Callable[[DecodeSample], float | None]) -> Points:
    def collect(blocks: Sequence[Block]) -> dict[int, list[float]]:
        points: dict[int, list[float]] = {}
        for block in blocks:
            for sample in block.decode:
                value = pick(sample)
                if value is not None:
                    points.setdefault(sample.concurrency, []).append(value)
        return points

    return collect


def _by_number(
    result: Result, title: str, x: str, y: str, points: Points, *, log: bool = False
) -> Plot | None:
    data = {arm.name: points(side(result, arm.name)) for arm in result.arms}
    numbers = sorted({number for arm in data.values() for number in arm})
    if not numbers:
        return None
    figure, axes = _figure(5.2, 3.2)
    place = {number: position for position, number in enumerate(numbers)}
    said = []
    for shift, arm in zip((-0.08, 0.08) if len(data) > 1 else (0.0,), result.arms, strict=True):
        colour = _ARM_COLOURS[arm.name]
        middles = []
        for number, values in sorted(data[arm.name].items()):
            middle = spread(values)
            middles.append((place[number] + shift, middle.median))
            axes.plot(
                [place[number] + shift] * len(values),
                values,
                "o",
                color=colour,
                alpha=0.45,
                markersize=4,
            )
            said.append(f"{_name(result, arm.name)}{number:,}: {middle.median:,.1f}")
        axes.plot(
            *zip(*middles, strict=True), "-", color=colour, label=arm.label, linewidth=1.4
        ) if middles else None
    axes.set_xticks(range(len(numbers)), [f"{number:,}" for number in numbers])
    axes.set_xlim(-0.5, len(numbers) - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.yaxis.set_major_formatter("{x:,g}")
    if len(data) > 1:
        axes.legend(frameon=False)
    return Plot(title, _svg(figure, title), f"{title} in {y}, medians by {x}: {'; '.join(said)}")


def _ratios(result: Result) -> Plot | None:
    lines = [
        line
        for line in result.lines
        if line.id.startswith("ab.") and line.unit == "ratio" and line.value
    ]
    if not lines:
        return None
    figure, axes = _figure(6.4, 0.9 + 0.34 * len(lines))
    colours = {"pass": "#4f9d69", "fail": "#c0504d", "inconclusive": "#d9a021"}
    for row, line in enumerate(reversed(lines)):
        assert line.value is not None
        colour = colours.get(line.verdict.value, "#5b6470")
        if line.low is not None and line.high is not None:
            axes.plot([line.low, line.high], [row, row], "-", color=colour, linewidth=2)
        axes.plot([line.value], [row], "o", color=colour)
        if line.limit:
            axes.plot(
                [float(line.limit.removeprefix(">= "))], [row], "|", color="#333333", markersize=13
            )
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    axes.set_yticks(
        range(len(lines)), [line.title.removesuffix(", B / A") for line in reversed(lines)]
    )
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.set_xlabel("B / A with interval; the upright mark is the limit")
    text = "; ".join(f"{line.title} {line.value:.3f}" for line in lines)
    return Plot("B over A", _svg(figure, "ratios"), f"Ratios: {text}")


def _needle(result: Result) -> Plot | None:
    rows = [
        (
            f"{_name(result, block.arm)}block {block.index + 1} run {run.run + 1}",
            outcome_counts([run]),
        )
        for block in result.blocks
        for run in block.needle
        if run.answers
    ]
    if not rows:
        return None
    figure, axes = _figure(6.4, 1.0 + 0.3 * len(rows))
    for row, (_, counts) in enumerate(reversed(rows)):
        left = 0
        for outcome in NeedleOutcome:
            axes.barh(row, counts[outcome], left=left, color=_OUTCOME_COLOURS[outcome], height=0.7)
            left += counts[outcome]
    for outcome in NeedleOutcome:
        if any(counts[outcome] for _, counts in rows):
            axes.barh(0, 0, color=_OUTCOME_COLOURS[outcome], label=outcome.value)
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_xlabel("answers")
    axes.grid(visible=False, axis="y")
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    text = "; ".join(
        f"{name}: {', '.join(f'{k.value} {v}' for k, v in counts.items())}" for name, counts in rows
    )
    return Plot("Needle checksum", _svg(figure, "needle"), text)


def _name(result: Result, arm: str) -> str:
    return f"{arm} " if len(result.arms) > 1 else ""


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, salt: str) -> str:
    """The figure as an <svg> element; ids are salted so that several fit on one page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(
        r'id="((?:figure|axes|patch|text|line2d|matplotlib|xtick|ytick|legend|PathCollection)[._]?[\w.]*)"',
        "",
        svg,
    )
