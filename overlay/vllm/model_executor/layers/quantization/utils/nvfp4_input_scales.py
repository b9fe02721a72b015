# SPDX-License-Identifier: Apache-2.0
"""Input scales of NVFP4 MoE layers: zero until loaded, and zero means absent.

A weight-only layer (W4A16_NVFP4) has ``w13_input_scale`` [E, 1 or 2] and ``w2_input_scale`` [E] (float32) but its
checkpoint never fills them. Memory as the allocator left it would look like calibrated scales.
"""

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

_NAMED_EXPERTS = 8


def zero_until_loaded(*parameters: torch.nn.Parameter) -> None:
    """Fill *parameters* with zero, now and whenever a weight reload makes them anew.

    A layerwise reload materializes a parameter from its metadata and attributes; it reads ``value_until_loaded``
    there (``model_loader/reload/meta.py``).
    """
    for parameter in parameters:
        parameter.data.zero_()
        set_weight_attrs(parameter, {"value_until_loaded": 0.0})


def require_input_scales(
    method: "ModelOptNvFp4FusedMoE",
    layer: torch.nn.Module,
    w13_divisor: torch.Tensor | None,
    w2_divisor: torch.Tensor | None,
) -> None:
    """Refuse a W4A4 layer that would divide by an absent input scale.

    Call it after the weights were converted and before the layer's parameters are replaced: the divisors are what
    the backend takes the reciprocal of (some backends reduce the scales over experts first, so that a few absent
    ones do no harm; weight-only backends return None), ``layer.w13_input_scale`` and ``layer.w2_input_scale`` are
    the values as loaded.

    Raises:
        ValueError: names the layer and the experts without a usable scale.
    """
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import _use_a16

    if _use_a16(method.nvfp4_backend, method.use_a16):
        return
    for name, divisor in (("w13_input_scale", w13_divisor), ("w2_input_scale", w2_divisor)):
        if divisor is None or bool(_usable(divisor).all()):
            continue
        loaded = getattr(layer, name)
        per_expert = loaded.amax(dim=1) if loaded.dim() == 2 else loaded
        experts = torch.nonzero(~_usable(per_expert)).flatten().tolist()
        named = ", ".join(str(expert) for expert in experts[:_NAMED_EXPERTS])
        if len(experts) > _NAMED_EXPERTS:
            named += f" and {len(experts) - _NAMED_EXPERTS} more"
        raise ValueError(
            f"{getattr(layer, 'layer_name', type(layer).__name__)}: {name} is absent (zero) or not a positive finite "
            f"number for {len(experts)} of {per_expert.numel()} experts: {named}. This layer runs W4A4 on "
            f"{method.nvfp4_backend.value} and would divide by it. Use a checkpoint in which every expert is "
            "calibrated, or run the layer weight-only: --moe-backend b12x with VLLM_B12X_MOE_FP4_FORCE_A16=1, or "
            "--moe-backend marlin."
        )


def _usable(scale: torch.Tensor) -> torch.Tensor:
    """Which entries are positive, finite and have a finite reciprocal."""
    return (scale > 0) & torch.isfinite(scale) & torch.isfinite(1.0 / scale.float())
