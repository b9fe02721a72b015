# SPDX-License-Identifier: Apache-2.0
"""A line that says whether something the overlay promises was active on one side, and by what evidence."""

from __future__ import annotations

from dataclasses import dataclass

from b12x_overlay.qualify.schema import Arm, Line, Result, VerdictKind


@dataclass(frozen=True)
class Evidence:
    """What is known of one side, and from where."""

    active: bool
    basis: str
    note: str | None = None
    undecided: bool = False
    """It is no proof of what `active` says: the line is inconclusive where something is wanted."""


@dataclass(frozen=True)
class Promise:
    """What a line is about."""

    id: str
    title: str
    wanted: bool | None
    """None: nobody says whether it should be active."""
    without: str
    """What to do where there is no evidence."""


def activity_line(
    result: Result, arm: Arm, promise: Promise, evidence: Evidence | None, *, asked: bool
) -> Line | None:
    """The line; without evidence it is missing if it is *asked* for, else there is none."""
    several = len(result.arms) > 1
    limit = None if promise.wanted is None else f"= {promise.wanted:d}"
    line = Line(
        id=f"{arm.name.lower()}.{promise.id}" if several else promise.id,
        title=f"{arm.name}: {promise.title}" if several else promise.title,
        unit="", value=None, basis="not measured", limit=limit, verdict=VerdictKind.MISSING, note=promise.without,
    )  # fmt: skip
    if evidence is None:
        return line if asked else None
    line.value, line.basis, line.note = float(evidence.active), evidence.basis, evidence.note
    if promise.wanted is None:
        line.verdict = VerdictKind.INFO
    elif evidence.undecided:
        line.verdict = VerdictKind.INCONCLUSIVE
    else:
        line.verdict = VerdictKind.PASS if evidence.active == promise.wanted else VerdictKind.FAIL
    return line


def is_restarted(result: Result) -> bool:
    """Whether A and B are one server that --restart starts with other variables (they always differ in one)."""
    return any(arm.restart_environment for arm in result.arms)
