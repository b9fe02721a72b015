# SPDX-License-Identifier: Apache-2.0
"""What happens around one MoE call of a CSF layer: its scales are in the scratch before the first launch.

Implements ``b12x_a4.dual_plan.MoECallHooks``. One expansion per MoE call, however many launches it is split into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.nvfp4_csf.layer import CsfLayer

IDS_PER_EXPERT = 16
"""From this many routes per expert on nearly every expert is routed to, and skipping the others gains nothing."""


def expands_all(routes: int, experts: int) -> bool:
    """Whether a call of *routes* routes (rows times top-k) expands every expert."""
    return routes >= IDS_PER_EXPERT * experts


class ExpandInLine:
    """Expands a layer's own scales in front of its launches, on their stream."""

    def __init__(self, layer: CsfLayer) -> None:
        self._layer = layer

    def before(self, topk_ids: torch.Tensor, split: Any) -> None:
        """Fill the scratch for this call; *topk_ids* is int32 ``[rows, top_k]`` of all its rows."""
        layer = self._layer
        if expands_all(topk_ids.numel(), layer.experts):
            layer.expansion.expand()
        else:
            layer.expansion.expand_routed(topk_ids)

    def after(self, split: Any) -> None:
        """Nothing: the next user of the scratch is ordered after this call by the stream."""


def make_hooks(layer: CsfLayer) -> ExpandInLine:
    """The hooks for *layer*."""
    return ExpandInLine(layer)
