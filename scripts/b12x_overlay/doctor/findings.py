# SPDX-License-Identifier: Apache-2.0
"""What the doctor reports: findings, each with its remedy, and the state of each feature."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters; only problems change the exit code."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing seen.

    Attributes:
        area: packages, b12x, gpu, settings, flags, checkpoint or image.
        level: see :class:`Level`.
        text: what was seen, with names and values.
        fix: what to change, empty where nothing is wrong.
    """

    area: str
    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Feature:
    """Whether one feature will be active in a server started with what was examined.

    Attributes:
        name: as in README.
        asked: a switch, a flag or the checkpoint asks for it.
        active: True, False, or None where what was given does not decide it.
        why: the reason, with counts of layers where they matter.
        fix: what to change to get it; empty if it is active or was not asked for.
    """

    name: str
    asked: bool
    active: bool | None
    why: str
    fix: str = ""

    @property
    def will_fail(self) -> bool:
        """Asked for, and known not to work."""
        return self.asked and self.active is False
