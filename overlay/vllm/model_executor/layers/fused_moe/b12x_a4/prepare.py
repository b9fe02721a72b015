# SPDX-License-Identifier: Apache-2.0
"""Weight preparation for a dual plan: up-first source weights that both modes read, and nothing copied.

``prepare_weights`` of a plan for nvfp4 and w4a16 keeps references to the tensors it is given (weights and F8_128x4 block
scales) and allocates fp32 alphas ``[E]`` and a few kilobytes of lock words per layer. The layout must be "w13", up
first: with "w31" the NVFP4 kernels exchange the halves in place at their first use, under the feet of the W4A16 ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import b12x
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.b12x_a4.dual_plan import DualPlan
from vllm.model_executor.layers.fused_moe.b12x_a4.plans import NVFP4, W4A16
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import KEEP_PACKED

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.b12x_a4.experts import DualPlanExperts


_weight_plans: dict[Any, Any] = {}


def prepare_shared_weights(
    experts: DualPlanExperts,
    dual: DualPlan,
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: MoEActivation,
    params_dtype: torch.dtype,
) -> Any:
    """Prepare the weights that both modes run on.

    Args:
        w1: uint8 ``[E, 2n, H/2]``, up rows first; w2: uint8 ``[E, H, n/2]``. Used in place.
        params_dtype: dtype of activations and output.

    Returns:
        b12x's prepared experts; ``w1``, ``w2`` and the block scales keep their addresses for kind "dual", and are
        repacked in place for kind "bind".
    """
    b12x._canonicalize_fp4_zero_signs_(w1)
    b12x._canonicalize_fp4_zero_signs_(w2)
    fused_moe = b12x._require_b12x_fused_moe()
    num_experts = int(w1.shape[0])
    if dual.scales is None:
        a1_gscale = a2_gscale = experts._unit_scale(w1.device, num_experts)
    else:
        a1_gscale, a2_gscale = dual.scales.tensors(w1.device)
    if dual.kind == "bind":
        a1_gscale = a1_gscale[:1].clone()
    plan = fused_moe.plan_weights(
        quant_modes=(NVFP4, W4A16) if dual.kind == "dual" else W4A16,
        source_format="modelopt_nvfp4",
        activation=b12x._b12x_activation_name(activation),
        params_dtype=params_dtype,
        num_experts=num_experts,
        hidden_size=int(w2.shape[1]),
        intermediate_size=int(w2.shape[2]) * 2,
        w13_layout="w13",
    )
    # One object for equal plans: every bind compares the experts' plan with its own, which is quick when it is the same.
    plan = _weight_plans.setdefault(plan, plan)
    return fused_moe.prepare_weights(
        plan=plan,
        w1_fp4=w1,
        w1_blockscale=experts.w1_scale,
        w1_global_scale=experts._weight_global_scale(
            w1.device, num_experts, experts.g1_alphas, "w1 global scales"
        ),
        a1_gscale=a1_gscale,
        w2_fp4=w2,
        w2_blockscale=experts.w2_scale,
        w2_global_scale=experts._weight_global_scale(
            w2.device, num_experts, experts.g2_alphas, "w2 global scales"
        ),
        a2_gscale=a2_gscale,
        params_dtype=params_dtype,
        immutable_input_scales=dual.scales is not None,
    )


def prepare_packed_copy(
    experts: DualPlanExperts,
    dual: DualPlan,
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: MoEActivation,
    params_dtype: torch.dtype,
) -> Any:
    """Upstream's packed W4A16 weights, from copies of the sources (packing rewrites what it is given).

    Raises:
        RuntimeError: the device has no room for them; names the variable to unset.
    """
    weight_scales = experts.quant_config._w1, experts.quant_config._w2
    sources = [description.scale for description in weight_scales]
    try:
        for description, source in zip(weight_scales, sources, strict=True):
            description.scale = source.detach().clone()
        return b12x.B12xExperts._prepare_experts(
            experts,
            w1=w1.detach().clone(),
            w2=w2.detach().clone(),
            activation=activation,
            params_dtype=params_dtype,
        )
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"{dual.layer_name}: no memory for packed W4A16 weights beside the native ones; unset {KEEP_PACKED}"
        ) from error
    finally:
        for description, source in zip(weight_scales, sources, strict=True):
            description.scale = source
