# SPDX-License-Identifier: Apache-2.0
"""The outcome as Markdown, for a pull request's text or one standing issue: the same outcome gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterable

from markdown_it.token import Token

from b12x_overlay.changes.markdown import bullets, code, heading, paragraph, text, to_markdown
from b12x_overlay.changes.model import plain
from b12x_overlay.sync.outcome import NOTHING, SYNCED, WOULD_SYNC, Outcome
from b12x_overlay.sync.plan import BRING, SKIP, THERE, Step

_SHOWN = 100


def render(outcome: Outcome) -> str:
    """The whole report."""
    tips = outcome.tips
    lines = f"{tips.canonical.name} to {tips.beta.name}" if tips else "canonical to beta"
    tokens = paragraph([text(f"Sync of {lines}.")])
    if outcome.kind in (SYNCED, WOULD_SYNC, NOTHING) and outcome.error is None:
        tokens += _section("Brought", _steps(outcome, BRING))
        tokens += _section("Not brought", [*_steps(outcome, THERE), *_steps(outcome, SKIP)])
        tokens += _section("What differs, and why", (
            f"{one.path}: {one.reason}: {one.detail}" for one in outcome.tree
        ))  # fmt: skip
        tokens += _section("Checked", outcome.checks)
    else:
        tokens += _trouble(outcome)
    return to_markdown(tokens)


def _trouble(outcome: Outcome) -> list[Token]:
    tokens: list[Token] = []
    if outcome.conflict:
        commit = outcome.conflict.commit
        tokens += heading(2, "Conflict")
        tokens += paragraph(
            [text(f"{commit.id[:12]} {plain(commit.subject)} (by {plain(commit.author)})")]
        )
        for clash in outcome.clashes:
            place = f"{clash.path}:{clash.line}" if clash.line else clash.path
            tokens += paragraph([text(f"{plain(place)}: {clash.kind}")])
            tokens += code(
                f"{side:>9} | {plain(line)}"
                for side, found in (("beta", clash.beta), ("canonical", clash.canonical))
                for line in found[:20]
            )
    tokens += _section("Refused", (f"{one.what}. {one.way_out}" for one in outcome.refusals))
    if outcome.error:
        tokens += heading(2, "Stopped")
        tokens += code(plain(line) for line in str(outcome.error).split("\n"))
        if outcome.error.hint:
            tokens += paragraph([text(f"Next: {plain(outcome.error.hint)}")])
    tokens += paragraph(
        [text("Neither line was changed. In a full clone this shows the same and leads on:")]
    )
    return tokens + code(["scripts/sync-beta --push"])


def _section(title: str, lines: Iterable[str]) -> list[Token]:
    items = [paragraph([text(plain(line))]) for line in lines]
    if not items:
        return []
    if len(items) > _SHOWN:
        items = [*items[:_SHOWN], paragraph([text(f"and {len(items) - _SHOWN} more")])]
    return [*heading(2, title), *bullets(items)]


def _steps(outcome: Outcome, decision: str) -> list[str]:
    return [_step(step) for step in (outcome.plan.having(decision) if outcome.plan else [])]


def _step(step: Step) -> str:
    why = [f"{step.evidence.kind}: {step.evidence.detail}"] if step.evidence else []
    reasons = "; ".join([*why, *step.notes])
    return f"{step.commit.id[:12]} {step.commit.subject} (by {step.commit.author})" + (
        f": {reasons}" if reasons else ""
    )
