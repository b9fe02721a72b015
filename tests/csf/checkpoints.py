# SPDX-License-Identifier: Apache-2.0
"""A small made-up ModelOpt NVFP4 checkpoint that vLLM's Qwen3-MoE model can load, written by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from csf.streams import plausible_scales
from safetensors.torch import save_file
from support.cpu_engine import TINY_MODEL

QUANTIZATION: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
}
EXPERTS = "model.layers.{layer}.mlp.experts.{expert}.{projection}"


def config(**changes: Any) -> dict[str, Any]:
    """config.json of the checkpoint: the tiny model of ``support.cpu_engine``."""
    return {**TINY_MODEL, "quantization_config": QUANTIZATION, **changes}


def expert_tensors(
    prefix: str, rows: int, k: int, seed: int, input_scale: bool = True
) -> dict[str, torch.Tensor]:
    """One projection ``[rows, k]`` of one expert."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.from_numpy(plausible_scales(rows, k // 16, seed))
    tensors = {
        f"{prefix}.weight": torch.randint(0, 256, (rows, k // 2), generator=generator).byte(),
        f"{prefix}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{prefix}.weight_scale_2": torch.tensor(2.0**-12),
    }
    if input_scale:
        tensors[f"{prefix}.input_scale"] = torch.tensor(0.01 * (1 + seed % 3))
    return tensors


def layer_tensors(
    config: dict[str, Any], layer: int, input_scale: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """All tensors of one decoder layer."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    head, queries, keys = (
        config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    generator = torch.Generator().manual_seed(layer + 1000 * seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / hidden**0.5).bfloat16()

    base = f"model.layers.{layer}"
    tensors = {
        f"{base}.input_layernorm.weight": torch.ones(hidden).bfloat16(),
        f"{base}.post_attention_layernorm.weight": torch.ones(hidden).bfloat16(),
        f"{base}.self_attn.q_norm.weight": torch.ones(head).bfloat16(),
        f"{base}.self_attn.k_norm.weight": torch.ones(head).bfloat16(),
        f"{base}.self_attn.q_proj.weight": random(queries * head, hidden),
        f"{base}.self_attn.k_proj.weight": random(keys * head, hidden),
        f"{base}.self_attn.v_proj.weight": random(keys * head, hidden),
        f"{base}.self_attn.o_proj.weight": random(hidden, queries * head),
        f"{base}.mlp.gate.weight": random(config["num_experts"], hidden),
    }
    for expert in range(config["num_experts"]):
        for index, (projection, rows, k) in enumerate(
            (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner))
        ):
            prefix = EXPERTS.format(layer=layer, expert=expert, projection=projection)
            own = (layer * 100 + expert) * 3 + index + 1000 * seed
            tensors |= expert_tensors(prefix, rows, k, own, input_scale)
    return tensors


def write(
    root: Path,
    *,
    mtp_layer: bool = True,
    input_scale: bool = True,
    shards: int = 3,
    seed: int = 0,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Write the checkpoint to *root* and return its tensors.

    *seed* changes all layers' weights. With *mtp_layer* there is one layer more than num_hidden_layers says, NVFP4 like the others. Tensors of one expert
    lie in different shards, as sharding by size makes them.
    """
    root.mkdir(parents=True)
    made = config(**changes)
    generator = torch.Generator().manual_seed(99)
    vocabulary, hidden = made["vocab_size"], made["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": torch.randn(
            vocabulary, hidden, generator=generator
        ).bfloat16(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
        "lm_head.weight": torch.randn(vocabulary, hidden, generator=generator).bfloat16(),
    }
    for layer in range(made["num_hidden_layers"] + mtp_layer):
        tensors |= layer_tensors(made, layer, input_scale, seed)
    names = sorted(tensors)
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, root / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (root / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    (root / "config.json").write_text(json.dumps(made, indent=2))
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    return tensors


def small(root: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint for the converter's tests, where size only costs time."""
    return write(
        root,
        **{
            "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 2, "vocab_size": 32, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 1, **changes,
        },
    )  # fmt: skip


def as_bytes(tensor: torch.Tensor) -> bytes:
    return np.asarray(tensor.contiguous().reshape(-1).view(torch.uint8)).tobytes()
