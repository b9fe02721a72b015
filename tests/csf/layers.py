# SPDX-License-Identifier: Apache-2.0
"""Real NVFP4 MoE layers in the three ways to load them: ordinary, compressed at load, from CSF streams.

vLLM's own parameters, weight loaders and methods; only b12x is the reference (``support.reference_b12x``). Import
after the ``vllm`` fixture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from csf.streams import plausible_scales
from nvfp4_csf import codec
from support.moe_layer import Geometry, make_layer
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.nvfp4_csf import config as csf_config
from vllm.model_executor.layers.quantization.nvfp4_csf import streams_loader

SMALL = Geometry(E=4, H=128, I=64, topk=2)
SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
Tensors = dict[tuple[int, str, str], torch.Tensor]
"""Checkpoint tensors of one layer by expert, vLLM shard name and suffix."""


def checkpoint_tensors(
    geometry: Geometry = SMALL, seed: int = 0, input_scale: bool = True
) -> Tensors:
    """What a ModelOpt NVFP4 checkpoint holds for one MoE layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for expert in range(geometry.E):
        unit = float(torch.rand(1, generator=generator)) + 0.5
        for number, shard in enumerate(SHARDS):
            rows, k = (geometry.H, geometry.I) if shard == "w2" else (geometry.I, geometry.H)
            scales = plausible_scales(rows, k // 16, seed=1000 * seed + 3 * expert + number)
            tensors[expert, shard, "weight"] = torch.randint(
                0, 256, (rows, k // 2), generator=generator
            ).byte()
            tensors[expert, shard, "weight_scale"] = torch.from_numpy(scales).view(
                torch.float8_e4m3fn
            )
            tensors[expert, shard, "weight_scale_2"] = torch.tensor(unit * 2.0**-9)
            if input_scale:
                tensors[expert, shard, "input_scale"] = torch.tensor(0.01 * (1 + expert))
    return tensors


def as_streams(tensors: Tensors) -> Tensors:
    """The same with the block scales as packed streams, which is what the CSF loader hands out."""
    result = dict(tensors)
    for key, tensor in tensors.items():
        if key[2] == "weight_scale":
            streams = codec.encode(np.asarray(tensor.view(torch.uint8)))
            result[key] = streams_loader.pack(
                torch.from_numpy(streams.fixed), torch.from_numpy(streams.exceptions), *tensor.shape
            )
    return result


def load(layer: Any, tensors: Tensors, process: bool = True) -> Any:
    """Feed *tensors* through the parameters' weight loaders, as vLLM's models do, and process the layer."""
    for (expert, shard, suffix), tensor in tensors.items():
        parameter = getattr(layer, ("w2_" if shard == "w2" else "w13_") + suffix)
        name = f"{layer.layer_name}.{'w2' if shard == 'w2' else 'w13'}_{suffix}"
        parameter.weight_loader(
            parameter, tensor, name, shard_id=shard, expert_id=expert, return_success=True
        )
    if process:
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def make_ordinary(number: int = 0, geometry: Geometry = SMALL, **more: Any) -> Any:
    """A layer of an ordinary checkpoint."""
    return make_layer(geometry=geometry, prefix=_prefix(number), **more)


make_compressing = make_ordinary
"""The same call; VLLM_B12X_CSF_COMPRESS decides."""


def make_streams(
    number: int = 0, geometry: Geometry = SMALL, algo: str = "NVFP4", **more: Any
) -> Any:
    """A layer of a CSF checkpoint; ``take_inventory`` has to be answered by a fixture."""
    quant_config = ModelOptNvFp4Config(quant_method=algo, is_checkpoint_nvfp4_serialized=True)
    quant_config.nvfp4_csf = csf_config.CsfCheckpoint(Path("/models/csf"), True)
    more.setdefault("vllm_config", loading_csf())
    return make_layer(geometry=geometry, prefix=_prefix(number), quant_config=quant_config, **more)


def loading_csf(load_format: str = "nvfp4_csf") -> VllmConfig:
    """A configuration with ``--load-format nvfp4_csf``."""
    config = VllmConfig()
    config.load_config.load_format = load_format
    return config


def _prefix(number: int) -> str:
    return f"model.layers.{number}.mlp.experts"
