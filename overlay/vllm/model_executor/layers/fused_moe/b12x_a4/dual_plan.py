# SPDX-License-Identifier: Apache-2.0
"""What one MoE layer is told to do: the single attribute that load-time decisions hand to the experts class.

``layer.b12x_dual_plan`` is absent or None for every layer that stays on upstream's path. A layer that has one is run by
:class:`~vllm.model_executor.layers.fused_moe.b12x_a4.experts.DualPlanExperts`.

The seam for block scales that do not live in the checkpoint's form (NVFP4-CSF): a quantisation method may call
``set_dual_plan(layer, DualPlan(name, scales or None, external_block_scales=True, hooks=...))`` itself. The layer's
``w13_weight_scale`` and ``w2_weight_scale`` are then scratch tensors in b12x's F8_128x4 order that ``hooks.before``
fills for every MoE call; the dual plan reads them in place and copies nothing from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from vllm.model_executor.layers.fused_moe.b12x_a4.provider import PlanKind
from vllm.model_executor.layers.fused_moe.b12x_a4.scales import ActivationScales
from vllm.v1.worker.moe_row_types import note_armed_layer

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.b12x_a4.parts import StepSplit

ATTRIBUTE = "b12x_dual_plan"


class MoECallHooks(Protocol):
    """Called once per MoE call, whatever the number of launches it is split into."""

    def before(self, topk_ids: torch.Tensor, split: StepSplit | None) -> None:
        """Before the first launch, on its stream. *topk_ids*: int32 ``[rows, top_k]`` of the whole call.

        *split* is None when the call is one W4A16 launch (decode-only, capture, no row types).
        """

    def after(self, split: StepSplit | None) -> None:
        """After the last launch was queued; also called when a launch raised."""


@dataclass(frozen=True)
class DualPlan:
    """How a layer's experts are prepared and run.

    Attributes:
        layer_name: for messages and the ranks' digest.
        scales: the layer's calibrated activation scales; None runs every row W4A16 (unit activation scales).
        kind: "dual" (one plan for both modes over the source weights) or "bind" (b12x's own A4 over packed weights).
        keep_packed: also hold packed W4A16 weights, and run W4A16 rows on them.
        external_block_scales: the block scales are scratch that is rewritten before each call, so nothing may be
            derived from their values at load; excludes ``keep_packed`` and kind "bind".
        hooks: called around each MoE call.
    """

    layer_name: str
    scales: ActivationScales | None
    kind: PlanKind = "dual"
    keep_packed: bool = False
    external_block_scales: bool = False
    hooks: MoECallHooks | None = None

    def __post_init__(self) -> None:
        if self.external_block_scales and (self.keep_packed or self.kind == "bind"):
            raise ValueError(
                f"{self.layer_name}: packed weights copy the block scales they are prepared from; "
                "they cannot be used with external block scales"
            )


def set_dual_plan(layer: torch.nn.Module, plan: DualPlan) -> None:
    """Give *layer* its plan, and let the model runner know that row types are needed where the plan has scales."""
    setattr(layer, ATTRIBUTE, plan)
    if plan.scales is not None:
        note_armed_layer()


def experts_class(cls: type, layer: torch.nn.Module) -> type:
    """The experts class for *layer*: *cls*, or the dual-plan class where load-time decisions ask for it."""
    if getattr(layer, ATTRIBUTE, None) is None:
        return cls
    # Imported for armed layers only: it imports b12x, which other backends' users need not have.
    from vllm.model_executor.layers.fused_moe.b12x_a4.experts import DualPlanExperts

    if not issubclass(DualPlanExperts, cls):
        raise TypeError(f"a dual plan is for B12xExperts, not {cls.__name__}")
    return DualPlanExperts
