# SPDX-License-Identifier: Apache-2.0
"""What a run ended with, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from b12x_overlay.changes.model import plain
from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.sync.conflict import Clash
from b12x_overlay.sync.plan import BRING, REFUSE, SKIP, THERE, Plan, Refusal, Step
from b12x_overlay.sync.tips import Tips
from b12x_overlay.sync.treereport import Difference

NOTHING, SYNCED, WOULD_SYNC, REFUSED, CONFLICT, ABORTED = (
    "nothing-to-do", "synced", "would-sync", "refused", "conflict", "aborted",
)  # fmt: skip
CONFLICT_CODE = 5
SYNCED_CODE = 10
"""With --detailed-exit-code; without it a sync that landed is 0, like one that had nothing to do."""

_CODES = {NOTHING: 0, SYNCED: 0, WOULD_SYNC: int(ExitCode.DIFFERENT), REFUSED: int(ExitCode.REFUSED),
          CONFLICT: CONFLICT_CODE, ABORTED: 0}  # fmt: skip
_SHOWN_LINES = 12


@dataclass
class Outcome:
    """Everything a run found out."""

    kind: str = NOTHING
    tips: Tips | None = None
    plan: Plan | None = None
    result: str = ""
    fragment: str = ""
    landed: str = ""
    """Where the result went: a ref, here or at the remote."""
    tree: list[Difference] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    conflict: Step | None = None
    clashes: list[Clash] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    error: CommandError | None = None

    def exit_code(self, detailed: bool) -> int:
        if self.error is not None:
            return int(self.error.code)
        return SYNCED_CODE if detailed and self.kind == SYNCED else _CODES[self.kind]

    def as_json(self) -> dict[str, Any]:
        steps = self.plan.steps if self.plan else []
        return {
            "outcome": "failed"
            if self.error and self.error.code != ExitCode.REFUSED
            else self.kind,
            "canonical": self.tips.canonical.tip if self.tips else None,
            "beta": self.tips.beta.tip if self.tips else None,
            "lines": {
                "canonical": self.tips.canonical.branch or self.tips.canonical.name,
                "beta": self.tips.beta.branch,
                "work": self.tips.work_branch,
                "work_tip": self.result if self.landed and self.tips.remote else self.tips.work,
            }
            if self.tips
            else None,
            "result": self.result or None,
            "landed": self.landed or None,
            "fragment": self.fragment or None,
            "brought": sum(step.decision == BRING for step in steps),
            "plan": [_step_json(step) for step in steps],
            "checks": self.checks,
            "warnings": self.warnings,
            "tree": [difference.as_json() for difference in self.tree],
            "refusals": [vars(refusal) for refusal in self.refusals],
            "conflict": {
                "commit": self.conflict.commit.id,
                "subject": self.conflict.commit.subject,
                "places": [clash.as_json() for clash in self.clashes],
                "commands": self.commands,
            }
            if self.conflict
            else None,
            "error": {
                "reason": self.error.reason,
                "message": str(self.error),
                "next": self.error.hint,
            }
            if self.error
            else None,
        }


def _step_json(step: Step) -> dict[str, Any]:
    evidence = step.evidence
    return {
        "commit": step.commit.id,
        "subject": step.commit.subject,
        "author": step.commit.author,
        "decision": step.decision,
        "evidence": {
            "kind": evidence.kind,
            "detail": evidence.detail,
            "twins": list(evidence.twins),
        }
        if evidence
        else None,
        "notes": step.notes,
        "result": step.result or None,
    }


def print_plan(console: Console, plan: Plan) -> None:
    """One line for each canonical commit: its decision and why."""
    colours = {BRING: "green", THERE: "dim", SKIP: "dim", REFUSE: "red"}
    for step in plan.steps:
        why = f"{step.evidence.kind}: {step.evidence.detail}" if step.evidence else ""
        why = "; ".join(part for part in (why, *step.notes) if part)
        line = f"{step.decision:<7}{step.commit.id[:12]} {plain(step.commit.subject)}" + (
            f"  [{plain(why)}]" if why else ""
        )
        console.say(console.paint(line, colours[step.decision]))


def print_outcome(console: Console, outcome: Outcome) -> None:
    """The end of a run: what happened, or what stopped it and the way out."""
    for line in outcome.checks:
        console.say(f"checked: {plain(line)}")
    for difference in outcome.tree:
        text = f"differs: {difference.status} {plain(difference.path)}: {difference.reason}: {plain(difference.detail)}"
        console.say(text if difference.explained else console.paint(text, "red"))
    for refusal in outcome.refusals:
        console.error(plain(refusal.what), plain(refusal.way_out))
    if outcome.conflict:
        _print_conflict(console, outcome)
    if outcome.error:
        lines = (plain(line) for line in str(outcome.error).split("\n"))
        console.error("\n".join(lines), plain(outcome.error.hint))
    else:
        console.say(console.paint(_summary(outcome), "bold"))


def _summary(outcome: Outcome) -> str:
    brought = len(outcome.plan.having(BRING)) if outcome.plan else 0
    changes = f"{brought} change" + ("" if brought == 1 else "s")
    if outcome.kind == SYNCED:
        return f"synced: {changes}, recorded as {outcome.fragment}; {outcome.landed} is now {outcome.result[:12]}"
    if outcome.kind == WOULD_SYNC:
        return f"would sync: {changes}, recorded as {outcome.fragment}; nothing was changed"
    if outcome.kind == CONFLICT:
        return "conflict: neither line was changed"
    if outcome.kind == REFUSED:
        return "refused: nothing was changed"
    if outcome.kind == ABORTED:
        return "aborted: the unfinished sync is gone, neither line was changed"
    return "nothing to do: beta has all of canonical that it takes"


def _print_conflict(console: Console, outcome: Outcome) -> None:
    step = outcome.conflict
    assert step is not None
    console.error(
        f"conflict: {step.commit.id} {plain(step.commit.subject)} (by {plain(step.commit.author)})"
    )
    for clash in outcome.clashes:
        place = f"{plain(clash.path)}:{clash.line}" if clash.line else plain(clash.path)
        console.say(f"{console.paint(place, 'bold')}: {clash.kind}")
        for name, lines in (("beta", clash.beta), ("canonical", clash.canonical)):
            for line in lines[:_SHOWN_LINES]:
                console.say(f"    {name:>9} | {plain(line)}")
            if len(lines) > _SHOWN_LINES:
                console.say(f"    {name:>9} | … {len(lines) - _SHOWN_LINES} more lines")
    if outcome.commands:
        console.say("to resolve it by hand and go on:")
        for command in outcome.commands:
            console.say(f"    {command}")
