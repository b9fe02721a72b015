# SPDX-License-Identifier: Apache-2.0
"""Is A4 really active? One line per arm that states it, from counters or the log; then the lines about CSF."""

from __future__ import annotations

from b12x_overlay.qualify.activity import Evidence, Promise, activity_line, is_restarted
from b12x_overlay.qualify.csf_lines import csf_lines
from b12x_overlay.qualify.needle_counts import cold_needle_tokens
from b12x_overlay.qualify.promises import QUESTIONS
from b12x_overlay.qualify.ratio_lines import side
from b12x_overlay.qualify.schema import Arm, Block, Line, Result

_VARIABLE = QUESTIONS["a4"].variable
_COUNTERS = "the server's counters"
_COUNTERS_NEED = "PROMETHEUS_MULTIPROC_DIR"
"""Without this variable the counters of vLLM's worker are not in /metrics."""
_ENOUGH = 0.5
"""Share of the prompt tokens in eager steps that must have run with A4. Of a prompt of several chunks all full ones are of
one size, so if those run A4 it is at least half, whatever a short last chunk does. The rest of a prompt's tokens, warm-up
requests and other parts' prompts only add rows."""


def promise_lines(result: Result) -> list[Line]:
    """One line per arm and promise; without anything to read, only the A/B that asks gets one, as missing."""
    lines = [_a4(result, arm) for arm in result.arms]
    return [line for line in lines if line is not None] + csf_lines(result)


def _a4(result: Result, arm: Arm) -> Line | None:
    wanted = _wanted(result, arm)
    evidence = _counted(result, arm, wanted) or _logged(arm) or _uncounted(result, arm)
    return activity_line(
        result, arm,
        Promise(
            "a4.active", "A4 prefill active", wanted,
            "no A4 counter in /metrics for every block and no log of the server: start it with "
            f"{_COUNTERS_NEED} set to an empty folder, or give --server-log",
        ),
        evidence, asked=result.question == "a4",
    )  # fmt: skip


def _counted(result: Result, arm: Arm, wanted: bool | None) -> Evidence | None:
    """What the counters say, if they were read in every block that was measured."""
    blocks = [block for block in side(result, arm.name) if block.started is not None]
    if not blocks or any(block.a4_rows is None for block in blocks):
        return None
    rows = sum(block.a4_rows or 0 for block in blocks)
    missed = sum(block.a4_missed_rows or 0 for block in blocks)
    sent = sum(_sent(result, arm, block) for block in blocks)
    note = f"{rows:,} prefill rows ran with A4, {sent:,} prompt tokens were sent cold"
    if missed:
        note += f", {missed:,} rows ran in W4A16 from a CUDA graph"
    if wanted is False:
        return Evidence(rows > 0 or missed > 0, _COUNTERS, note)
    short = [block.index + 1 for block in blocks if not _enough(result, arm, block)]
    if short and len(short) < len(blocks):
        note += f"; too few rows in block {', '.join(map(str, short))}"
    if missed > rows > 0:
        note += "; most prompts were too short for an eager step: nothing is said of A4"
    return Evidence(not short, _COUNTERS, note, undecided=not short and missed > rows)


def _enough(result: Result, arm: Arm, block: Block) -> bool:
    """Whether A4 ran what it should have: of the cold prompts, all that no CUDA graph took, or nearly so."""
    rows, eager = block.a4_rows or 0, _sent(result, arm, block) - (block.a4_missed_rows or 0)
    return rows > 0 and rows >= _ENOUGH * eager


def _sent(result: Result, arm: Arm, block: Block) -> int:
    """Prompt tokens of answered requests that no prefix cache can have shortened."""
    prefill = sum(sample.prompt_tokens for sample in block.prefill)
    return prefill + cold_needle_tokens(result, arm, block)


def _logged(arm: Arm) -> Evidence | None:
    if arm.a4_log is None:
        return None
    notes = {"active": "first A4 call logged", "armed": "armed, but no A4 call logged", "off": None}
    return Evidence(arm.a4_log == "active", "the server's log", notes[arm.a4_log])


def _uncounted(result: Result, arm: Arm) -> Evidence | None:
    """No counter here while the other side has it: of one restarted server that means no row.

    The counter appears with its first row. Of another server its absence means nothing: that one may lack the folder
    that puts the counters into /metrics.
    """
    theirs = [other for other in result.arms if other is not arm]
    same_set_up = is_restarted(result) and all(
        (_COUNTERS_NEED in other.restart_environment) == (_COUNTERS_NEED in arm.restart_environment)
        for other in theirs
    )
    ours = [block for block in side(result, arm.name) if block.started is not None]
    counted_there = any(
        block.a4_rows is not None for other in theirs for block in side(result, other.name)
    )
    if not (same_set_up and counted_there and ours and arm.abilities.get("metrics")) or any(
        block.a4_rows is not None for block in ours
    ):
        return None
    return Evidence(
        False,
        _COUNTERS,
        "no A4 counter after a restart with this side's variables, the other side has it",
    )


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
