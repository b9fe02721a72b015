# SPDX-License-Identifier: Apache-2.0
"""What a sync would do with each canonical commit, and what stops it."""

from __future__ import annotations

from dataclasses import dataclass, field

from b12x_overlay.git import Git
from b12x_overlay.sync.evidence import Evidence, Matching, find_evidence
from b12x_overlay.sync.held import Held, read_tree
from b12x_overlay.sync.history import Commit, History, read_renames

BRING, THERE, SKIP, REFUSE = "bring", "there", "skip", "refuse"


@dataclass
class Step:
    """One canonical commit and its decision; picking may turn *bring* into *there* (an empty pick) or *skip*."""

    commit: Commit
    decision: str
    evidence: Evidence | None = None
    notes: list[str] = field(default_factory=list)
    result: str = ""
    """The commit on the work branch that carries it."""


@dataclass(frozen=True)
class Refusal:
    """Something that a person has to put right first."""

    code: str
    commit: str
    what: str
    way_out: str


@dataclass
class Plan:
    """All decisions, in the order of picking."""

    steps: list[Step]
    refusals: list[Refusal]
    matching: Matching
    history: History
    held: Held

    def having(self, decision: str) -> list[Step]:
        return [step for step in self.steps if step.decision == decision]


def make_plan(git: Git, history: History, held: Held, folder: str) -> Plan:
    """Decide for each canonical commit.

    Args:
        folder: the fragment folder.
    """
    fragments = {path: blob for path, (_, blob) in read_tree(git, history.beta_tip, folder).items()}
    matching = find_evidence(git, history, folder, fragments)
    plan = Plan([], _published_edits(git, history, held, folder), matching, history, held)
    for commit in history.canonical:
        plan.steps.append(_step(commit, matching, held))
    for step in plan.steps:
        if step.decision == REFUSE:
            plan.refusals.append(_merge_refusal(step.commit))
    _name_kinds(git, plan)
    return plan


def _step(commit: Commit, matching: Matching, held: Held) -> Step:
    evidence = matching.found.get(commit.id)
    if evidence:
        return Step(commit, THERE, evidence)
    if commit.is_merge:
        if len(commit.parents) > 2 or any(path not in held for path in commit.own):
            return Step(commit, REFUSE)
        return Step(commit, SKIP, notes=["merge: its commits are listed on their own"])
    if not commit.changes:
        return Step(commit, SKIP, notes=["changes nothing"])
    if all(held.pin(path) for path in commit.paths):
        return Step(
            commit,
            SKIP,
            notes=["only version pins that beta keeps: " + ", ".join(sorted(commit.paths))],
        )
    return Step(commit, BRING)


def _name_kinds(git: Git, plan: Plan) -> None:
    """Say what is special about a commit: a revert, renamed files, changed modes, kept pins."""
    bring = plan.having(BRING)
    renames = read_renames(git, [step.commit.id for step in bring])
    for step in bring:
        commit = step.commit
        if commit.reverts:
            target = plan.history.canonical_by_id.get(commit.reverts)
            step.notes.append(
                f"reverts {commit.reverts[:12]}" + (f" {target.subject}" if target else "")
            )
        step.notes += [f"renames {old} to {new}" for old, new in renames.get(commit.id, [])]
        step.notes += [
            f"mode of {change.path}: {change.old_mode} to {change.new_mode}"
            for change in commit.changes
            if change.status in "MT" and change.old_mode != change.new_mode
        ]
        pins = [path for path in sorted(commit.paths) if plan.held.pin(path)]
        step.notes += [f"beta keeps its {path}" for path in pins]


def _merge_refusal(commit: Commit) -> Refusal:
    if len(commit.parents) > 2:
        what = (
            f"merge of {len(commit.parents)} lines at once: what it adds of its own cannot be told"
        )
    else:
        what = (
            "merge with content of its own in "
            + ", ".join(commit.own[:5])
            + (" …" if len(commit.own) > 5 else "")
        )
    return Refusal(
        "merge", commit.id, f"{commit.id[:12]} {commit.subject}: {what}",
        f"bring it by hand: on a branch from beta, git cherry-pick -x -m 1 {commit.id[:12]}, land that; "
        "its trailer then counts for all that the merge brought",
    )  # fmt: skip


def _published_edits(git: Git, history: History, held: Held, folder: str) -> list[Refusal]:
    """Canonical commits after which a published fragment would not be the same bytes."""
    canonical = read_tree(git, history.canonical_tip, folder)
    refusals = []
    for path, blob in sorted(held.published.items()):
        touching = [
            (commit, change)
            for commit in history.canonical
            for change in commit.changes
            if change.path == path
        ]
        now = canonical.get(path, ("", ""))[1]
        if not touching or now == blob:
            continue
        commit, change = touching[-1]
        verb = {"A": "adds", "D": "deletes"}.get(change.status, "edits")
        refusals.append(
            Refusal(
                "published-fragment", commit.id,
                f"{commit.id[:12]} {commit.subject}: {verb} {path}, which is published on beta; "
                f"beta has blob {blob}, canonical has {'blob ' + now if now else 'none'}",
                f"put beta's bytes back on canonical (git cat-file blob {blob[:12]} > {path}), and correct it on "
                f"canonical by a new fragment that names the old one in requires",
            )
        )  # fmt: skip
    return refusals
