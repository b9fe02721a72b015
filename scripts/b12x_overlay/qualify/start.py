# SPDX-License-Identifier: Apache-2.0
"""Begin a result, or take up a partial one."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Literal

from b12x_overlay.qualify.errors import RefusedError
from b12x_overlay.qualify.schema import Arm, ArmName, Block, Result
from b12x_overlay.qualify.settings import Plan, Thresholds

Question = Literal["a4", "csf", "prefetch"]


def new_result(
    plan: Plan, thresholds: Thresholds, arms: list[Arm], question: Question | None
) -> Result:
    """An empty result with all its blocks."""
    names: dict[str, ArmName] = {"A": "A", "B": "B"}
    now = datetime.now(UTC)
    return Result(
        run_id=secrets.token_hex(6),
        tool={name: version(name) for name in ("httpx", "numpy", "scipy")}
        | {"python": python_version()},
        created=now,
        updated=now,
        status="partial",
        question=question,
        plan=plan,
        thresholds=thresholds,
        arms=arms,
        blocks=[Block(arm=names[letter], index=index) for index, letter in enumerate(plan.order)],
    )


def resume(
    result: Result,
    plan: Plan,
    thresholds: Thresholds,
    arms: list[Arm],
    question: Question | None,
    folder: Path,
) -> None:
    """Check that *result* can be continued as asked, and take the present thresholds.

    Raises:
        RefusedError: it is the result of another plan; the differences are named.
    """
    changed = _changes(result.plan.model_dump(mode="json"), plan.model_dump(mode="json"))
    if result.question != question:
        changed.append(f"question: {result.question} there, {question} asked")
    there = [(arm.name, arm.restart_environment) for arm in result.arms]
    asked = [(arm.name, arm.restart_environment) for arm in arms]
    if there != asked:
        changed.append(f"sides and variables: {there} there, {asked} asked")
    if changed:
        raise RefusedError(
            f"{folder} holds the result of another plan:\n  " + "\n  ".join(changed)
            + "\nGive the same options to resume it, or another --out."
        )  # fmt: skip
    result.thresholds = thresholds
    for arm, new in zip(result.arms, arms, strict=True):
        arm.label = new.label


def _changes(old: dict[str, object], new: dict[str, object], prefix: str = "") -> list[str]:
    found = []
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _changes(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: {before} there, {after} asked")
    return sorted(found)
