# SPDX-License-Identifier: Apache-2.0
"""report.md and report.html beside result.json."""

from __future__ import annotations

from typing import Any

import jinja2
from markupsafe import Markup

from b12x_overlay.qualify.faults import FaultKind
from b12x_overlay.qualify.needle_counts import outcome_counts
from b12x_overlay.qualify.plots import plots
from b12x_overlay.qualify.promises import QUESTIONS
from b12x_overlay.qualify.schema import Line, NeedleOutcome, Result
from b12x_overlay.qualify.store import RESULT, Store
from b12x_overlay.qualify.summary import interval, shown, side_figure

_PROMISES = ("a4", "csf")
"""Lines that are about one side and belong to the comparison, since it means nothing without them."""


def report_names(store: Store) -> tuple[str, str]:
    """The page and the summary: of ``result.json`` report.html and report.md, of another file ones of its name."""
    stem = "report" if store.path.name == RESULT else store.path.stem
    return f"{stem}.html", f"{stem}.md"


def write_reports(result: Result, store: Store) -> None:
    """Render both reports into the result's folder."""
    page, summary = report_names(store)
    store.write(summary, markdown(result))
    store.write(page, html(result))


def markdown(result: Result) -> str:
    """The summary as Markdown."""
    return _environment(escape=False).get_template("report.md.j2").render(_context(result))


def html(result: Result) -> str:
    """The page: self-contained, without scripts."""
    drawn = [
        {"title": plot.title, "text": plot.text, "svg": Markup(plot.svg)} for plot in plots(result)
    ]
    return (
        _environment(escape=True)
        .get_template("report.html.j2")
        .render(_context(result) | {"plots": drawn})
    )


def _context(result: Result) -> dict[str, Any]:
    faults: dict[tuple[str, FaultKind], tuple[int, str]] = {}
    for block in result.blocks:
        for fault in block.faults:
            count, example = faults.get((block.arm, fault.kind), (0, fault.example))
            faults[block.arm, fault.kind] = (count + fault.count, example)
    return {
        "result": result,
        "question": QUESTIONS[result.question].title if result.question else None,
        "faults": [
            (arm, kind.value, count, example) for (arm, kind), (count, example) in faults.items()
        ],
        "stops": [
            (block.arm, block.index + 1, stop) for block in result.blocks for stop in block.stopped
        ],
        "outcomes": [
            (block.arm, block.index + 1, run.run + 1, outcome_counts([run]))
            for block in result.blocks
            for run in block.needle
        ],
        "kinds": list(NeedleOutcome),
        "compared": [line for line in result.lines if not _of_side(result, line)],
        "sides": _by_side(result),
    }


def _of_side(result: Result, line: Line) -> bool:
    """Whether a line of an A/B is about one side alone."""
    if len(result.arms) < 2 or line.id.startswith("ab."):
        return False
    return line.id.split(".")[1] not in _PROMISES


def _by_side(result: Result) -> list[tuple[str, list[Line | None]]]:
    """The lines about one side, side by side: title, then one line (or None) per arm."""
    rows: dict[str, dict[str, Line]] = {}
    for line in result.lines:
        if _of_side(result, line):
            arm, _, rest = line.id.partition(".")
            rows.setdefault(rest, {})[arm.upper()] = line
    return [
        (
            next(iter(row.values())).title.partition(": ")[2],
            [row.get(arm.name) for arm in result.arms],
        )
        for row in rows.values()
    ]


def _environment(*, escape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("b12x_overlay.qualify"),
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "shown": shown,
        "interval": interval,
        "side_figure": side_figure,
        "cell": _cell,
        "when": _when,
    }
    return environment


def _cell(value: object) -> str:
    """Text that cannot break out of a Markdown table cell or become markup in it."""
    text = " ".join(str(value).split())
    for character in "\\`*_[]<>|~#":
        text = text.replace(character, "\\" + character)
    return text


def _when(value: Any) -> str:
    return f"{value:%Y-%m-%d %H:%M} UTC"
