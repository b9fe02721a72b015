# SPDX-License-Identifier: Apache-2.0
"""Is A4 really active? One line per arm that states it, from counters or the log."""

from __future__ import annotations

from b12x_overlay.qualify.promises import QUESTIONS
from b12x_overlay.qualify.ratio_lines import side
from b12x_overlay.qualify.schema import Arm, Line, Result, VerdictKind

_VARIABLE = QUESTIONS["a4"].variable


def promise_lines(result: Result) -> list[Line]:
    """One line per arm; without anything to read, only an A/B about A4 gets one, as missing."""
    return [line for arm in result.arms if (line := _a4(result, arm)) is not None]


def _a4(result: Result, arm: Arm) -> Line | None:
    blocks = side(result, arm.name)
    known = [block.a4_rows for block in blocks if block.a4_rows is not None]
    wanted = _wanted(result, arm)
    prefix = f"{arm.name}: " if len(result.arms) > 1 else ""
    line = Line(
        id=f"{arm.name.lower()}.a4.active" if prefix else "a4.active", title=f"{prefix}A4 prefill active", unit="",
        value=None, basis="", limit=None if wanted is None else ("= 1" if wanted else "= 0"), verdict=VerdictKind.INFO,
    )  # fmt: skip
    if known:
        rows = sum(known)
        missed = sum(block.a4_missed_rows or 0 for block in blocks)
        line.value = float(rows > 0)
        line.basis = "the server's counters"
        line.note = f"{rows:,} prefill rows ran with A4"
        if missed:
            line.note += f", {missed:,} in W4A16 from a CUDA graph"
    elif arm.a4_log is not None:
        line.value = float(arm.a4_log == "active")
        line.basis = "the server's log"
        line.note = {
            "active": "first A4 call logged",
            "armed": "armed, but no A4 call logged",
            "off": None,
        }[arm.a4_log]
    elif _other_side_counts(result, arm):
        line.value = 0.0
        line.basis = "the server's counters"
        line.note = "no A4 counter here, the other side has it"
    elif result.question == "a4":
        line.basis = "not measured"
        line.verdict = VerdictKind.MISSING
        line.note = (
            "no A4 counter in /metrics and no log: start the server with PROMETHEUS_MULTIPROC_DIR set to an empty "
            "folder, or give --server-log"
        )
        return line
    else:
        return None
    if wanted is not None:
        line.verdict = VerdictKind.PASS if bool(line.value) == wanted else VerdictKind.FAIL
    return line


def _wanted(result: Result, arm: Arm) -> bool | None:
    """Whether A4 should be active: by the question, else by the server's variable; None if nobody says."""
    if result.question == "a4":
        return arm.name == "B"
    stated = arm.identity.environment if arm.identity else {}
    value = arm.restart_environment.get(_VARIABLE, stated.get(_VARIABLE))
    if value is None:
        return None
    try:
        return int(value) > 0
    except ValueError:
        return False


def _other_side_counts(result: Result, arm: Arm) -> bool:
    """Whether another arm of the same server set-up has the counter, which appears with its first count."""
    return any(block.a4_rows is not None for block in result.blocks if block.arm != arm.name)
