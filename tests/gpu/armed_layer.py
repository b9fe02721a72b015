# SPDX-License-Identifier: Apache-2.0
"""An armed layer at GLM-5.3-Flash TP2 size for benchmarks: the product's experts class with random weights."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from support.moe_layer import Geometry

GEOMETRY = Geometry(E=288, H=4096, I=1024, topk=8)


class ArmedLayer:
    """One layer's experts and the inputs of a call."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self._call: tuple[torch.Tensor, ...] = ()

    def prepare(self, rows: int) -> None:
        """Random inputs of *rows* rows, and scratch for every split of them."""
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device="cuda")

        x = torch.randn((rows, GEOMETRY.H), generator=generator, device="cuda").to(torch.bfloat16)
        ids = random(rows, GEOMETRY.E).topk(GEOMETRY.topk).indices.to(torch.int32).contiguous()
        nbytes = self.experts._scratch_nbytes(rows, GEOMETRY.topk)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        self._call = (scratch, x, random(rows, GEOMETRY.topk), ids, torch.empty_like(x))

    @torch.inference_mode()
    def run(self, split: Any) -> None:
        """What a call does once its split is known; None is one W4A16 launch."""
        self.experts._run(split, *self._call)


def make() -> ArmedLayer:
    """Load a calibrated layer the way vLLM does, filled on the GPU."""
    os.environ["VLLM_B12X_MOE_FP4_FORCE_A16"] = "1"
    os.environ["B12X_W4A16_A4_PREFILL_MIN_TOKENS"] = "1"
    from gpu import sm90

    sm90.install()
    from support import moe_layer, sm120

    sm120.allow_b12x()
    import vllm.distributed.parallel_state as parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    parallel_state._PP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    init_workspace_manager(torch.device("cuda", 0))
    layer = moe_layer.make_layer("NVFP4", GEOMETRY, moe={"device": "cuda"}).to("cuda")
    for name in ("w13_weight", "w2_weight"):
        getattr(layer, name).data.random_(0, 256)
        scale = getattr(layer, f"{name}_scale").data
        scale.copy_(torch.rand(scale.shape, device="cuda") + 0.5)
        getattr(layer, f"{name}_scale_2").data.fill_(1e-2)
    moe_layer.fill_input_scales(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return ArmedLayer(layer.quant_method.moe_kernel.fused_experts)


def splits(rows: int, ranges: int) -> dict[str, Any]:
    """A step of *rows* rows whose *ranges* prefill ranges are each followed by one decode row: sliced and gathered."""
    from vllm.model_executor.layers.fused_moe.b12x_a4.parts import make_split

    step = rows // ranges
    prefill = tuple((at, at + step - 1) for at in range(0, ranges * step, step))
    return {
        name: make_split(rows, prefill, max_sliced_parts=limit)
        for name, limit in (("sliced", 2 * ranges + 1), ("gathered", 0))
    }
