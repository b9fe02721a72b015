# SPDX-License-Identifier: Apache-2.0
"""Activation scales of an NVFP4 MoE layer: are they calibrated, and what b12x is given.

A checkpoint stores ``input_scale = amax / (448 * 6)`` per expert and projection (ModelOpt), the reciprocal of what b12x
calls the activation global scale. vLLM reduces ``w13_input_scale`` to one value per expert before the experts class
sees it, which hides a missing half; everything here works on the tensors as they were loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScaleCheck:
    """Result of looking at a layer's loaded input scales.

    Attributes:
        calibrated: every value of every expert and half is usable.
        detail: why not, with counts; empty when calibrated.
    """

    calibrated: bool
    detail: str = ""


@dataclass(frozen=True)
class ActivationScales:
    """Activation global scales (reciprocals of the checkpoint's input scales) as host values.

    They are kept on the host so that a reload can fall back on them after sleep level 2 has dropped device memory.

    Attributes:
        input: the one scale all experts' FC1 input is quantised with: the smallest global scale over experts and both
            halves of ``w13``, which is the widest calibrated range.
        intermediate: FC2 input scale per expert.
    """

    input: float
    intermediate: tuple[float, ...]

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``(a1, a2)``, both fp32 ``[E]`` and contiguous: b12x reads full vectors in place, without a copy per call."""
        experts = len(self.intermediate)
        a1 = torch.full((experts,), self.input, dtype=torch.float32, device=device)
        a2 = torch.tensor(self.intermediate, dtype=torch.float32, device=device)
        return a1, a2


def check_input_scales(w13_input_scale: torch.Tensor, w2_input_scale: torch.Tensor) -> ScaleCheck:
    """Decide whether loaded input scales are a calibration.

    Args:
        w13_input_scale: fp32 ``[E, 2]`` (gate, up), as loaded.
        w2_input_scale: fp32 ``[E]``, as loaded.

    A value that is missing (the parameters start at zero), non-finite, negative or exactly one in any expert or half
    makes the layer uncalibrated. One is upstream's placeholder for "no scale"; a calibrated value that happens to be
    exactly one cannot be told from it and leaves its layer W4A16, which costs speed and never accuracy.
    """
    problems = []
    for name, scale in (("w13_input_scale", w13_input_scale), ("w2_input_scale", w2_input_scale)):
        values = scale.detach().to(device="cpu", dtype=torch.float32).reshape(scale.shape[0], -1)
        # A subnormal input scale has no finite reciprocal.
        usable = torch.isfinite(values) & (values > 0) & torch.isfinite(values.reciprocal())
        for unusable, what in (
            (~usable, "missing or unusable"),
            (values == 1, "1.0, the placeholder for none,"),
        ):
            experts = int(unusable.any(dim=1).sum())
            if experts:
                problems.append(f"{name} is {what} in {experts} of {values.shape[0]} experts")
    return ScaleCheck(not problems, "; ".join(problems))


def reduce_input_scales(
    w13_input_scale: torch.Tensor, w2_input_scale: torch.Tensor
) -> ActivationScales:
    """Global scales for b12x from calibrated input scales; the reciprocals are taken in fp32, as vLLM does."""
    w13 = w13_input_scale.detach().to(device="cpu", dtype=torch.float32)
    w2 = w2_input_scale.detach().to(device="cpu", dtype=torch.float32).reshape(-1)
    return ActivationScales(
        input=float(w13.reciprocal().amin()),
        intermediate=tuple(w2.reciprocal().tolist()),
    )


def gate_up_mismatch(w13_weight_scale_2: torch.Tensor) -> tuple[int, float]:
    """``(experts, ratio)``: experts whose gate and up weight global scales differ, and the largest ratio of a pair.

    b12x gets the gate's value for both halves (as upstream), so a difference scales the up projection wrongly.
    """
    pairs = w13_weight_scale_2.detach().to(device="cpu", dtype=torch.float32)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        return 0, 1.0
    low, high = pairs.amin(dim=1), pairs.amax(dim=1)
    different = low != high
    if not bool(different.any()):
        return 0, 1.0
    return int(different.sum()), float((high / low)[different].max())
