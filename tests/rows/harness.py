# SPDX-License-Identifier: Apache-2.0
"""A loaded NVFP4 MoE layer and calls to it, with row types in the forward context as the model runner sets them.

The layer's method and experts are vLLM's own (patched); only b12x is the reference.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from support.moe_layer import Geometry, fill_input_scales, fill_weights, make_layer

SMALL = Geometry(E=4, H=128, I=64, topk=2)
"""Small enough for thousands of calls."""


def load_layer(
    geometry: Geometry = SMALL,
    *,
    algo: str = "NVFP4",
    seed: int = 0,
    calibrated: bool = True,
    subnormal: bool = False,
    **layer: Any,
) -> Any:
    """A layer after ``process_weights_after_loading``, with scales that differ between experts and halves.

    *subnormal* gives it block scales that packing flushes, so that packed and native W4A16 differ.
    """
    module = make_layer(algo, geometry, **layer)
    fill(module, seed, calibrated)
    if subnormal:
        for name in ("w13_weight_scale", "w2_weight_scale"):
            scale = getattr(module, name).data
            scale[:, 0] = 448.0
            scale[:, 1:8] = 2.0**-8
    module.quant_method.process_weights_after_loading(module)
    return module


def fill(module: Any, seed: int = 0, calibrated: bool = True) -> None:
    """Checkpoint values for a layer that was just created."""
    fill_weights(module, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    experts = module.w13_weight.shape[0]
    per_expert = torch.rand(experts, generator=generator) + 0.5
    module.w13_weight_scale_2.data.copy_((per_expert * 1e-2)[:, None].expand(-1, 2))
    module.w2_weight_scale_2.data.copy_(per_expert.flip(0) * 1e-2)
    if calibrated:
        fill_input_scales(module)
        module.w13_input_scale.data.mul_(torch.rand(experts, 2, generator=generator) + 0.5)
        module.w2_input_scale.data.mul_(torch.rand(experts, generator=generator) + 0.5)


@contextmanager
def step(num_rows: int | None, prefill: Sequence[tuple[int, int]] = ()) -> Iterator[None]:
    """A forward context whose rows are typed; *num_rows* None leaves the row types empty."""
    from vllm.forward_context import ForwardContext, override_forward_context
    from vllm.v1.worker.moe_row_types import MoERowTypes

    context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
    if num_rows is not None:
        context.moe_row_types = MoERowTypes(num_rows, tuple(tuple(r) for r in prefill))
    with override_forward_context(context):
        yield


@dataclass
class Batch:
    """Inputs of one MoE call: activations ``[rows, H]`` bf16, ids int32 and weights fp32 ``[rows, top_k]``."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def make_batch(rows: int, geometry: Geometry = SMALL, seed: int = 0, padded: int = 0) -> Batch:
    """Random inputs; the last *padded* rows have ids of -1, as vLLM gives rows that pad a step."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, geometry.H, generator=generator).to(torch.bfloat16)
    ids = torch.stack(
        [torch.randperm(geometry.E, generator=generator)[: geometry.topk] for _ in range(rows)]
    )
    if padded:
        ids[rows - padded :] = -1
    weights = torch.rand(rows, geometry.topk, generator=generator)
    return Batch(x, weights, ids.to(torch.int32))


def call(layer: Any, batch: Batch) -> torch.Tensor:
    """The layer's MoE through vLLM's FusedMoEKernel, workspace and all."""
    return layer.quant_method.moe_kernel.apply(
        batch.x,
        layer.w13_weight,
        layer.w2_weight,
        batch.weights,
        batch.ids,
        activation=layer.activation,
        global_num_experts=layer.global_num_experts,
        expert_map=None,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
    ).clone()


def experts_of(layer: Any) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


def start(*layers: Any, draft: bool = False) -> None:
    """What the model loader does with *layers* once their weights are loaded."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(layers)
    model_config = SimpleNamespace(
        runner_type="draft" if draft else "generate",
        quantization="modelopt",
        dtype=torch.bfloat16,
        word_embeddings_untied_by_checkpoint=False,
    )
    process_weights_after_loading(model, model_config, torch.device("cpu"))


def warnings(log: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in log if record.levelno >= logging.WARNING]


def random_ranges(rng: random.Random, rows: int) -> list[tuple[int, int]]:
    """Ordered disjoint ranges anywhere in the step, adjacent ones too, from none to one row each."""
    cuts = sorted(rng.sample(range(rows + 1), k=min(rows + 1, 2 * rng.choice((1, 1, 2, 3, 7)))))
    if len(cuts) % 2:
        cuts.pop()
    return [(lo, hi) for lo, hi in zip(cuts[::2], cuts[1::2], strict=True) if lo < hi]
