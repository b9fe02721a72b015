# SPDX-License-Identifier: Apache-2.0
"""Are the activation scales of an expert layer calibrated? Read from the checkpoint's ``input_scale`` values.

The rule is the server's (``b12x_a4/scales.py``): a scale that is missing, zero, negative, not finite, without a finite
float32 reciprocal, or exactly one (upstream's placeholder for none) in any expert or half means that the layer is not
calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FLOAT32_MAX = 3.4028234663852886e38

HALVES = ("gate", "up", "down")
"""The three projections of an expert: w1, w3 (together w13) and w2."""


@dataclass(frozen=True)
class Calibration:
    """The verdict on one layer: *calibrated*, and the *reason* if it is not ("no input scales", ...)."""

    calibrated: bool
    reason: str = ""


def judge(experts: int, scales: Mapping[str, Mapping[int, float]]) -> Calibration:
    """Judge one layer.

    Args:
        experts: how many experts the layer has.
        scales: half ("gate", "up", "down") -> expert -> input_scale. An absent key is a missing scale. Layers without
            a gate (relu2) have no "up" mapping at all and pass ``{"gate": ..., "down": ...}``.
    """
    if not any(scales.values()):
        return Calibration(False, "no input scales")
    for half, values in scales.items():
        missing = [expert for expert in range(experts) if expert not in values]
        if missing:
            return Calibration(False, f"no {half} input scale in {_some(missing)}")
        bad = [expert for expert, value in values.items() if not _usable(value)]
        if bad:
            return Calibration(
                False, f"{half} input scale {values[bad[0]]!r} in {_some(sorted(bad))}"
            )
        ones = [expert for expert, value in values.items() if value == 1.0]
        if ones:
            return Calibration(
                False, f"{half} input scale 1.0, the placeholder for none, in {_some(sorted(ones))}"
            )
    return Calibration(True)


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0 and 1 / value <= _FLOAT32_MAX


def _some(experts: Sequence[int]) -> str:
    if len(experts) == 1:
        return f"expert {experts[0]}"
    shown = ", ".join(map(str, experts[:3]))
    return f"{len(experts)} experts ({shown}{', ...' if len(experts) > 3 else ''})"
