# SPDX-License-Identifier: Apache-2.0
"""The doctor's report for people."""

from __future__ import annotations

from b12x_overlay.console import Console
from b12x_overlay.doctor.examine import Report
from b12x_overlay.doctor.findings import Feature, Level

_COLOURS = {Level.OK: "green", Level.NOTE: "dim", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_COLOURS_OF_STATE = {"active": "green", "NOT ACTIVE": "red", "not decided": "yellow", "off": "dim"}


def show(report: Report, console: Console) -> None:
    """Versions, findings with their remedies, the table of features, one last line."""
    versions = ", ".join(f"{name} {version or '-'}" for name, version in report.versions.items())
    console.say(versions)
    console.say()
    width = max((len(finding.area) for finding in report.findings), default=0)
    for finding in report.findings:
        mark = console.paint(f"{finding.level.value:<8}", _COLOURS[finding.level])
        console.say(f"{mark} {finding.area:<{width}}  {finding.text}")
        if finding.fix:
            console.say(f"{'':<9}{'':<{width}}  -> {finding.fix}")
    console.say()
    width = max(len(feature.name) for feature in report.features)
    for feature in report.features:
        state = _state(feature)
        mark = console.paint(f"{state:<11}", _COLOURS_OF_STATE[state])
        console.say(
            f"{feature.name:<{width}}  {'asked for' if feature.asked else '':<9}  {mark}  {feature.why}"
        )
        if feature.fix:
            console.say(f"{'':<{width + 26}}-> {feature.fix}")
    console.say()
    console.say(_last_line(report, console))


def _state(feature: Feature) -> str:
    if feature.active is None:
        return "not decided"
    if feature.active:
        return "active"
    return "NOT ACTIVE" if feature.asked else "off"


def _last_line(report: Report, console: Console) -> str:
    wanted = [feature.name for feature in report.features if feature.asked]
    if report.works:
        text = (
            f"everything asked for will work: {', '.join(wanted)}"
            if wanted
            else "nothing is broken"
        )
        return console.paint(text, "green")
    reasons = []
    if report.problems:
        reasons.append(f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''}")
    inactive = [f.name for f in report.features if f.asked and f.active is False]
    undecided = [f.name for f in report.features if f.asked and f.active is None]
    if inactive:
        reasons.append(f"not active: {', '.join(inactive)}")
    if undecided:
        reasons.append(f"not decided: {', '.join(undecided)}")
    return console.paint("; ".join(reasons), "red")
