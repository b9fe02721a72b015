# SPDX-License-Identifier: Apache-2.0
"""One real NVFP4 MoE layer: vLLM's ModelOptNvFp4FusedMoE with weights that a test fills.

Call ``sm120.install()`` first. Shapes: E experts, hidden size H, intermediate size I of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Geometry:
    """Sizes of the layer; the defaults are the smallest that both b12x providers accept in both modes."""

    E: int = 8
    H: int = 512
    I: int = 256
    topk: int = 2
    dtype: torch.dtype = torch.bfloat16


def make_layer(
    algo: str = "NVFP4",
    geometry: Geometry = Geometry(),
    backend: str = "b12x",
    prefix: str = "model.layers.0.mlp.experts",
    *,
    quant_config: Any = None,
    vllm_config: Any = None,
    moe: dict[str, Any] | None = None,
    **layer: Any,
) -> Any:
    """A real RoutedExperts layer on CPU whose parameters exist and are not filled.

    *algo* is the checkpoint's ``quant_algo``: ``"NVFP4"`` (calibrated) or ``"W4A16_NVFP4"`` (weight only); it does not
    matter where *quant_config* is given. *vllm_config* is current while the layer is made; *moe* overrides fields of
    its FusedMoEConfig.
    *layer* goes to RoutedExperts, for example ``apply_router_weight_on_input=True``. Its ``quant_method`` is a real
    ModelOptNvFp4FusedMoE; ``process_weights_after_loading`` has not been called.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    from support import sm120

    if backend == "b12x":
        sm120.allow_b12x()
    parallel = FusedMoEParallelConfig.make_no_parallel()
    config: dict[str, Any] = {
        "num_experts": geometry.E,
        "experts_per_token": geometry.topk,
        "hidden_dim": geometry.H,
        "intermediate_size": geometry.I,
        "num_local_experts": geometry.E,
        "num_logical_experts": geometry.E,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": geometry.dtype,
        "moe_backend": backend,
        **(moe or {}),
    }
    experts = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=geometry.topk,
        global_num_experts=geometry.E,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    with set_current_vllm_config(vllm_config or VllmConfig()):
        return RoutedExperts(
            layer_name=prefix,
            params_dtype=geometry.dtype,
            moe_config=FusedMoEConfig(**config),
            quant_config=quant_config
            or ModelOptNvFp4Config(quant_method=algo, is_checkpoint_nvfp4_serialized=True),
            expert_map_manager=experts,
            **layer,
        )


def fill_weights(layer: Any, seed: int = 0) -> None:
    """Random FP4 weights, block scales between 0.5 and 1.5, weight global scales of 1e-3; input scales are left."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("w13_weight", "w2_weight"):
        getattr(layer, name).data.random_(0, 256, generator=generator)
    for name in ("w13_weight_scale", "w2_weight_scale"):
        scale = getattr(layer, name)
        scale.data.copy_(torch.rand(scale.shape, generator=generator) + 0.5)
    layer.w13_weight_scale_2.data.fill_(1e-3)
    layer.w2_weight_scale_2.data.fill_(1e-3)


def fill_input_scales(layer: Any, w13: float = 1e-2, w2: float = 1e-2) -> None:
    """Give every expert the same calibrated input scale."""
    layer.w13_input_scale.data.fill_(w13)
    layer.w2_input_scale.data.fill_(w2)
