# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints on disk, written with the safetensors library itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NVFP4: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
W4A16: dict[str, Any] = {**NVFP4, "quant_algo": "W4A16_NVFP4"}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def scales(
    layer: int, experts: int = 4, value: float = 0.02, prefix: str = "model."
) -> dict[str, torch.Tensor]:
    """Calibrated input scales of one layer, different in every expert and projection."""
    return {
        f"{prefix}layers.{layer}.mlp.experts.{e}.{p}.input_scale": torch.tensor(value * (1 + e) * (1 + i))
        for e in range(experts)
        for i, p in enumerate(PROJECTIONS)
    }  # fmt: skip


def weights(layer: int, experts: int = 4, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """The other tensors of one layer, tiny."""
    out: dict[str, torch.Tensor] = {}
    for e in range(experts):
        for p in PROJECTIONS:
            name = f"{prefix}layers.{layer}.mlp.experts.{e}.{p}"
            out[f"{name}.weight"] = torch.zeros(16, 8, dtype=torch.uint8)
            out[f"{name}.weight_scale"] = torch.zeros(16, 1, dtype=torch.float8_e4m3fn)
            out[f"{name}.weight_scale_2"] = torch.tensor(1e-3)
    out[f"{prefix}layers.{layer}.mlp.shared_experts.gate_proj.weight"] = torch.zeros(2, 2)
    return out


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    quant: dict[str, Any] | None,
    shards: int = 1,
    **config: Any,
) -> Path:
    """Write config.json and *shards* safetensors files with an index; returns *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {"model_type": "qwen3_moe", "num_hidden_layers": 2, **config}
    if quant is not None:
        text["quantization_config"] = quant
    (folder / "config.json").write_text(json.dumps(text))
    weight_map = {}
    for shard, names in enumerate(_split(sorted(tensors), shards), 1):
        file = f"model-{shard:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def calibrated(
    folder: Path, layers: Iterable[int] = (0, 1), quant: dict[str, Any] | None = None, **config: Any
) -> Path:
    """An ordinary calibrated ModelOpt NVFP4 checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        tensors |= weights(layer) | scales(layer)
    return write(folder, tensors, NVFP4 if quant is None else quant, shards=3, **config)


def _split(names: list[str], parts: int) -> list[list[str]]:
    return [names[part::parts] for part in range(parts)]
