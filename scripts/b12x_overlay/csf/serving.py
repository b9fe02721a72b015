# SPDX-License-Identifier: Apache-2.0
"""The small folder that vLLM is pointed at: the container's metadata and a config.json that names the container."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError, Console
from b12x_overlay.csf.core import Container, container
from b12x_overlay.csf.files import write_json
from b12x_overlay.csf.restore import copy_metadata, open_checked, read_metadata
from b12x_overlay.csf.workfolder import finish, working

# Written anew, and a file that describes tensors which are not in this folder.
_REPLACED = ("config.json", "hf_quant_config.json")
# Weights besides the shards in use: the same model in another form (consolidated.safetensors), or one that was left
# behind. They can be as large as the checkpoint, and with its load format vLLM reads the container's shards only.
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx",
    ".onnx_data", ".tflite",
}  # fmt: skip
_INDEX = ".index.json"


def write_serving_folder(root: Path, target: Path, console: Console) -> dict[str, Any]:
    """Make *target* for the container *root* (absolute); the tensors stay where they are and are not read.

    Raises:
        CommandError: a faulty container (what `open_checked` finds, or a used file of another SHA-256), an existing
            destination, a source without quantization config.
    """
    box = open_checked(root)
    metadata = root / "metadata"
    try:
        config = json.loads(read_metadata(box, "config.json"))
    except (FileNotFoundError, ValueError) as error:
        raise CommandError(f"{metadata / 'config.json'}: {error}") from None
    holder, text = config, config.get("text_config")
    if "quantization_config" not in config and "quantization_config" in (text or {}):
        holder = text
    source = _source_config(holder.get("quantization_config"), box)
    holder["quantization_config"] = {
        "quant_method": "nvfp4_csf",
        "format_version": 1,
        "checkpoint_root": str(root),
        "source_quantization_config": source,
    }
    job = {"what": "serving folder", "source": str(root), "identity": box.identity}
    with working(target, job, ()) as work:
        for name in box.metadata:
            if name not in _REPLACED and not _is_weights(name):
                copy_metadata(box, name, work)
        write_json(work / "config.json", config)
        finish(work, target)
    left_out = [name for name in box.metadata if _is_weights(name) and name != container.INDEX]
    if left_out:
        console.progress(f"left out, weights that vLLM would not read: {', '.join(left_out)}")
    return {
        "folder": str(target),
        "checkpoint_root": str(root),
        "identity": box.identity,
        "command": serve_command(target, source),
    }


def serve_command(folder: Path, source: dict[str, Any]) -> str:
    """What serves *folder*, to be pasted into a shell.

    Only a checkpoint whose NVFP4 layers are all W4A16_NVFP4 runs W4A16 by itself; any other is calibrated for W4A4,
    which compressed scales are not served with.
    """
    layers = _quantized_layers(source)
    named = layers.values() if isinstance(layers, dict) else ()
    algorithms = {_algorithm(layer) for layer in named if isinstance(layer, dict)} or {
        _algorithm(source)
    }
    is_weight_only = {name for name in algorithms if "NVFP4" in name} == {"W4A16_NVFP4"}
    force = "" if is_weight_only else "VLLM_B12X_MOE_FP4_FORCE_A16=1 "
    return (
        f"{force}vllm serve {shlex.quote(str(folder))} --quantization nvfp4_csf --load-format nvfp4_csf "
        "--moe-backend b12x"
    )


def _is_weights(name: str) -> bool:
    """A file of weights, or an index of such files, by its kind."""
    return Path(name.removesuffix(_INDEX)).suffix.lower() in _WEIGHTS


def _source_config(found: dict[str, Any] | None, box: Container) -> dict[str, Any]:
    """The source's quantization config, complete: older MIXED_PRECISION checkpoints have the algorithms of their
    layers in hf_quant_config.json alone, from where vLLM would read all of it. That file is not in the folder, and
    vLLM does not look for it if the layers are named at the top."""
    layers = _quantized_layers(found) if found else None
    if not found or (_algorithm(found) == "MIXED_PRECISION" and not layers):
        found = _hf_quant_config(box)
        layers = _quantized_layers(found)
    return {**found, "quantized_layers": layers} if layers else found


def _quantized_layers(config: dict[str, Any]) -> Any:
    return config.get("quantized_layers") or _nested(config).get("quantized_layers")


def _algorithm(config: dict[str, Any]) -> str:
    return str(config.get("quant_algo") or _nested(config).get("quant_algo")).upper()


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("quantization")
    return nested if isinstance(nested, dict) else {}


def _hf_quant_config(box: Container) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(read_metadata(box, "hf_quant_config.json"))
    except (FileNotFoundError, ValueError):
        raise CommandError(
            f"{box.root / 'metadata'}: no quantization_config in config.json and no usable hf_quant_config.json",
            hint="the source checkpoint has to be ModelOpt NVFP4",
        ) from None
    return config | {"quant_method": "modelopt"}
