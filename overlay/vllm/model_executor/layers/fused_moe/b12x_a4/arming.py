# SPDX-License-Identifier: Apache-2.0
"""Which MoE layers run their prefill rows in A4, decided once, when the weights have just been loaded.

:func:`arm_layer` is called by ``ModelOptNvFp4FusedMoE.process_weights_after_loading`` on the tensors as they came from
the checkpoint: ``w13_input_scale [E, 2]`` and ``w2_input_scale [E]`` before vLLM reduces them. The result is one
attribute of the layer (:mod:`dual_plan`); layers without it run upstream's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.b12x_a4.dual_plan import (
    ATTRIBUTE,
    DualPlan,
    set_dual_plan,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.provider import get_provider, settle_fork_switches
from vllm.model_executor.layers.fused_moe.b12x_a4.refusals import (
    configuration_without_row_types,
    refuse_weight_offloading,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.scales import (
    ActivationScales,
    check_input_scales,
    gate_up_mismatch,
    reduce_input_scales,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import get_settings

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

logger = init_logger(__name__)

_RECORD = "_b12x_a4_decision"


class Reason(Enum):
    """Why a layer is not armed; the value is how the start summary says it."""

    OFF = "A4 prefill is off"
    WEIGHT_ONLY = "weight-only layer (W4A16_NVFP4)"
    DRAFT = "draft layer, whose forwards hold no prefill rows"
    BACKEND = "MoE backend is not b12x"
    FORCE_A16 = "VLLM_B12X_MOE_FP4_FORCE_A16 is not set, so every row runs W4A4"
    COMPRESSED_TENSORS = (
        "compressed-tensors checkpoint, whose absent input scales cannot be told from loaded ones"
    )
    CONFIGURATION = "the configuration cannot match rows to requests"
    SHAPE = "unsupported shape, dtype or activation"
    ROUTER_WEIGHT = "router weights are applied to the input"
    PROVIDER = "the installed b12x lacks A4"
    UNCALIBRATED = "no calibrated activation scales"


@dataclass(frozen=True)
class Decision:
    """The outcome for one layer, kept for the summary, the ranks' digest and later reloads."""

    layer_name: str
    reason: Reason | None
    detail: str = ""
    scales: ActivationScales | None = None
    gate_up: tuple[int, float] = (0, 1.0)

    @property
    def armed(self) -> bool:
        return self.reason is None


class _Load:
    """The running model load."""

    is_draft = False


@contextmanager
def loading(is_draft: bool) -> Iterator[None]:
    """While the layers of a model are processed."""
    _Load.is_draft = is_draft
    try:
        yield
    finally:
        _Load.is_draft = False


def decisions_of(model: torch.nn.Module) -> list[Decision]:
    """The decisions on the layers of *model*, in its order."""
    found = (getattr(module, _RECORD, None) for module in model.modules())
    return [decision for decision in found if decision is not None]


def moe_methods(model: torch.nn.Module) -> str:
    """Names of the quantization methods of *model*'s MoE layers, for a message about why none of them is ours."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    names = {type(method).__name__ for method in methods if isinstance(method, FusedMoEMethodBase)}
    return ", ".join(sorted(names)) or "none at all"


def arm_layer(method: ModelOptNvFp4FusedMoE, layer: torch.nn.Module) -> None:
    """Decide on *layer* (or keep the first load's decision) and set its dual plan.

    Raises:
        ValueError: weight offloading is configured together with A4 prefill.
    """
    if not get_settings().enabled and method.nvfp4_backend.name == "B12X":
        settle_fork_switches(False)
    first = getattr(layer, _RECORD, None)
    if first is not None:
        _arm_again(layer, first)
        return
    decision = _decide(method, layer)
    setattr(layer, _RECORD, decision)
    if decision.armed:
        settings, provider = get_settings(), get_provider()
        assert provider.kind is not None
        plan = DualPlan(
            decision.layer_name,
            decision.scales,
            kind=provider.kind,
            keep_packed=settings.keep_packed and provider.kind == "dual",
        )
        set_dual_plan(layer, plan)


def _decide(method: ModelOptNvFp4FusedMoE, layer: torch.nn.Module) -> Decision:
    name = _name(layer)

    def no(reason: Reason, detail: str = "") -> Decision:
        return Decision(name, reason, detail)

    if not get_settings().enabled:
        return no(Reason.OFF)
    if method.use_a16:
        # Never armed, whatever the scale tensors hold: such checkpoints store no input scales.
        return no(Reason.WEIGHT_ONLY)
    if method.nvfp4_backend.name != "B12X":
        return no(Reason.BACKEND, f"{method.nvfp4_backend.value}; add --moe-backend b12x")
    if not envs.VLLM_B12X_MOE_FP4_FORCE_A16:
        return no(Reason.FORCE_A16)
    if _Load.is_draft:
        return no(Reason.DRAFT)
    config = get_current_vllm_config_or_none()
    problem = configuration_without_row_types(config)
    if problem:
        return no(Reason.CONFIGURATION, problem)
    if layer.apply_router_weight_on_input:
        return no(Reason.ROUTER_WEIGHT)
    problem = _shape_problem(method.moe, layer)
    if problem:
        return no(Reason.SHAPE, problem)
    provider = get_provider()
    refusal = settle_fork_switches(True)
    if refusal or provider.kind is None:
        return no(Reason.PROVIDER, refusal or f"{provider.name}: {provider.missing}")
    check = check_input_scales(layer.w13_input_scale, layer.w2_input_scale)
    if not check.calibrated:
        return no(Reason.UNCALIBRATED, check.detail)
    refuse_weight_offloading(config)
    return Decision(
        name,
        None,
        scales=reduce_input_scales(layer.w13_input_scale, layer.w2_input_scale),
        gate_up=gate_up_mismatch(layer.w13_weight_scale_2),
    )


def _arm_again(layer: torch.nn.Module, first: Decision) -> None:
    """A reload keeps the armed set of the first load: captured graphs and the other ranks rely on it.

    Scales that the reload did not bring are zero here (patch zeroed-input-scales).
    """
    if not first.armed:
        return
    check = check_input_scales(layer.w13_input_scale, layer.w2_input_scale)
    if check.calibrated:
        scales = reduce_input_scales(layer.w13_input_scale, layer.w2_input_scale)
        _replace_scales(layer, scales)
        return
    logger.warning(
        "%s: reloaded weights bring no usable input scales (%s); it stays armed for A4 prefill with those of the "
        "first load.",
        first.layer_name,
        check.detail,
    )
    assert first.scales is not None
    _replace_scales(layer, first.scales)


def _replace_scales(layer: torch.nn.Module, scales: ActivationScales) -> None:

    set_dual_plan(layer, replace(getattr(layer, ATTRIBUTE), scales=scales))


def _shape_problem(moe: Any, layer: torch.nn.Module) -> str:
    if layer.activation != MoEActivation.SILU:
        return f"activation {layer.activation.value}, needs silu"
    if moe.in_dtype != torch.bfloat16:
        return f"dtype {moe.in_dtype}, needs torch.bfloat16"
    if moe.hidden_dim % 128:
        return f"hidden size {moe.hidden_dim}, needs a multiple of 128"
    if get_provider().kind == "bind":
        # The interface's own limits: hidden % 256, per-rank intermediate % 64 (first builds: % 128).
        intermediate = layer.w2_weight.shape[2] * 2
        if moe.hidden_dim % 256 or intermediate % 64:
            return f"hidden size {moe.hidden_dim} and intermediate size {intermediate}, need multiples of 256 and 64"
    return ""


def _name(layer: torch.nn.Module) -> str:
    return getattr(layer, "layer_name", type(layer).__name__)


__all__ = ["Decision", "Reason", "arm_layer", "decisions_of", "loading", "moe_methods"]
