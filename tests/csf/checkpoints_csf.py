# SPDX-License-Identifier: Apache-2.0
"""CSF forms of the made-up checkpoint: container with serving folder, and the index layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from b12x_overlay.csf import cli
from csf import checkpoints
from safetensors.torch import load_file, save_file


def container(source: Path, target: Path) -> Path:
    """Convert *source*; returns the container."""
    assert cli.main(["--quiet", str(source), str(target)]) == 0
    return target


def serving(box: Path, target: Path) -> Path:
    """The folder that vLLM is pointed at."""
    assert cli.main(["--quiet", "--serving-folder", str(box), str(target)]) == 0
    return target


def index_layout(box: Path, target: Path, **quantization: Any) -> Path:
    """The same shards as an ordinary folder: ModelOpt MIXED_PRECISION whose experts say ``csf``."""
    target.mkdir()
    config = json.loads((box / "metadata" / "config.json").read_text())
    layers = {
        f"model.layers.{layer}.mlp.experts": {
            "quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf", **quantization,
        }
        for layer in range(config["num_hidden_layers"])
    }  # fmt: skip
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": checkpoints.QUANTIZATION["ignore"],
    }
    (target / "config.json").write_text(json.dumps(config))
    index = {}
    for shard in sorted((box / "tensors").iterdir()):
        tensors = load_file(shard)
        save_file(tensors, target / shard.name, {"format": "pt"})
        index |= dict.fromkeys(tensors, shard.name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return target
