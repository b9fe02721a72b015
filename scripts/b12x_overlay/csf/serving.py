# SPDX-License-Identifier: Apache-2.0
"""The small folder that vLLM is pointed at: the container's metadata and a config.json that names the container."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.csf.core import container
from b12x_overlay.csf.files import copy_whole, write_json
from b12x_overlay.csf.restore import open_checked
from b12x_overlay.csf.workfolder import finish, working

# The source's index and quantization file describe tensors that are not in this folder.
_LEFT_OUT = (container.INDEX, "hf_quant_config.json", "config.json")


def write_serving_folder(root: Path, target: Path) -> dict[str, Any]:
    """Make *target* for the container *root* (absolute); the tensors stay where they are.

    Raises:
        CommandError: a faulty container, an existing destination, a source without quantization config.
    """
    box = open_checked(root)
    metadata = root / "metadata"
    try:
        config = json.loads((metadata / "config.json").read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise CommandError(f"{metadata / 'config.json'}: {error}") from None
    holder, text = config, config.get("text_config")
    if "quantization_config" not in config and "quantization_config" in (text or {}):
        holder = text
    source = _source_config(holder.get("quantization_config"), metadata)
    holder["quantization_config"] = {
        "quant_method": "nvfp4_csf",
        "format_version": 1,
        "checkpoint_root": str(root),
        "source_quantization_config": source,
    }
    job = {"what": "serving folder", "source": str(root), "identity": box.identity}
    with working(target, job, ()) as work:
        for name in box.metadata:
            if name not in _LEFT_OUT:
                copy_whole(metadata / name, work / name)
        write_json(work / "config.json", config)
        finish(work, target)
    return {"folder": str(target), "checkpoint_root": str(root), "identity": box.identity}


def _source_config(found: dict[str, Any] | None, metadata: Path) -> dict[str, Any]:
    """The source's quantization config, complete: older MIXED_PRECISION checkpoints have the algorithms of their
    layers in hf_quant_config.json alone, from where vLLM would read all of it. That file is not in the folder, and
    vLLM does not look for it if the layers are named at the top."""
    layers = _quantized_layers(found) if found else None
    if not found or (_algorithm(found) == "MIXED_PRECISION" and not layers):
        found = _hf_quant_config(metadata)
        layers = _quantized_layers(found)
    return {**found, "quantized_layers": layers} if layers else found


def _quantized_layers(config: dict[str, Any]) -> Any:
    return config.get("quantized_layers") or _nested(config).get("quantized_layers")


def _algorithm(config: dict[str, Any]) -> str:
    return str(config.get("quant_algo") or _nested(config).get("quant_algo")).upper()


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("quantization")
    return nested if isinstance(nested, dict) else {}


def _hf_quant_config(metadata: Path) -> dict[str, Any]:
    path = metadata / "hf_quant_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        raise CommandError(
            f"{metadata}: no quantization_config in config.json and no usable hf_quant_config.json",
            hint="the source checkpoint has to be ModelOpt NVFP4",
        ) from None
    return config | {"quant_method": "modelopt"}
