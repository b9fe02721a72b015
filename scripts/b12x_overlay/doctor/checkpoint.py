# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's expert layers: recipe, calibration and scale encoding, from config and safetensors headers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from b12x_overlay.doctor import kinds, quantconfig
from b12x_overlay.doctor.calibration import Calibration, judge
from b12x_overlay.doctor.quantconfig import QuantConfig
from b12x_overlay.doctor.safetensors import CheckpointError, ScalarReader, TensorInfo, read_header

_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(.+)$")
_FUSED = re.compile(r"^(.+\.experts)\.(gate_up_proj|w13|down_proj|w2)[._](input_scale)$")
_HALF = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_CSF_STREAM = "weight_scale.nvfp4_csf_fixed"
_CSF_SCHEMA = "lil-nvfp4-csf-checkpoint/"


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of experts.

    Attributes:
        name: its prefix in the checkpoint, "model.layers.3.mlp.experts".
        draft: it belongs to the MTP draft model: its index is not below num_hidden_layers, or its name has "mtp".
        recipe: "NVFP4", "W4A16_NVFP4", "compressed-tensors", "unquantized", ...
        experts: number of experts in the checkpoint.
        csf: its block scales are stored as NVFP4-CSF streams.
        gate_up: experts whose gate and up weight global scales differ, and the largest ratio of a pair. vLLM takes
            the gate's for both.
    """

    name: str
    draft: bool
    recipe: str
    experts: int
    calibration: Calibration
    csf: bool
    gate_up: tuple[int, float] = (0, 1.0)


@dataclass(frozen=True)
class Checkpoint:
    """What was read. ``config`` is config.json with a ``text_config`` merged over it."""

    folder: Path
    quant: QuantConfig
    config: dict[str, Any] = field(default_factory=dict)
    layers: tuple[ExpertLayer, ...] = ()
    bare_container: bool = False

    @property
    def csf(self) -> bool:
        """Some layer's scales are CSF streams, whatever the config says."""
        return (
            self.bare_container or bool(self.quant.csf) or any(layer.csf for layer in self.layers)
        )


def locate(model: str, environ: Mapping[str, str], revision: str = "main") -> Path:
    """The folder of *model*: itself, or the snapshot of that repository in the Hugging Face cache.

    Raises:
        CheckpointError: neither is here.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise CheckpointError(f"{folder} is no folder: give the folder that holds config.json")
    home = Path(
        environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    cache = Path(
        environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    ).expanduser()
    repository = cache / ("models--" + model.strip("/").replace("/", "--"))
    reference = repository / "refs" / revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit
    if commit and snapshot.is_dir():
        return snapshot
    raise CheckpointError(
        f"{model} is no folder here and not in {cache}: give --checkpoint FOLDER, or download it first"
    )


def read(
    folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Checkpoint:
    """Read the checkpoint in *folder*; *progress* gets (files read, files in all).

    Raises:
        CheckpointError: no config, or a file that is missing, cut short or malformed.
    """
    manifest = folder / "manifest.json"
    if manifest.is_file() and str(_json(manifest).get("schema", "")).startswith(_CSF_SCHEMA):
        config = _config(folder / "metadata" / "config.json")
        quant = quantconfig.read(config, None)
        layers = _layers(
            sorted((folder / "tensors").glob("*.safetensors")), config, quant, progress
        )
        return Checkpoint(folder, quant, config, layers, bare_container=True)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: give the folder of the checkpoint")
    config = _config(folder / "config.json")
    legacy = folder / "hf_quant_config.json"
    quant = quantconfig.read(config, _legacy(legacy) if legacy.is_file() else None)
    files = _files(folder)
    if quant.csf == "container":
        root = Path(quant.checkpoint_root)
        if not (root / "tensors").is_dir():
            raise CheckpointError(
                f"{folder / 'config.json'}: checkpoint_root {root} is no CSF container here: mount the container at that "
                "path, or make this folder again with scripts/convert-csf --serving-folder"
            )
        files += sorted((root / "tensors").glob("*.safetensors"))
    return Checkpoint(folder, quant, config, _layers(files, config, quant, progress))


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: no weight_map")
    files = [folder / name for name in sorted(set(map(str, weight_map.values())))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} files of the index are missing, first {missing[0]}: "
            "the download is incomplete"
        )
    return files


def _legacy(path: Path) -> dict[str, Any]:
    value = _json(path)
    kinds.check(path, value, kinds.QUANTIZATION)
    return value


def _config(path: Path) -> dict[str, Any]:
    config = _json(path)
    kinds.check(path, config, kinds.CONFIG)
    text = config.get("text_config")
    return (
        {**config, **{k: v for k, v in text.items() if v is not None}}
        if isinstance(text, dict)
        else config
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


@dataclass
class _Raw:
    """Collected while headers are read: experts seen, where their input scales are, and whether scales are CSF."""

    experts: set[int] = field(default_factory=set)
    scales: dict[tuple[str, int], TensorInfo] = field(default_factory=dict)
    weight_scales: dict[tuple[str, int], TensorInfo] = field(default_factory=dict)
    fused: dict[str, TensorInfo] = field(default_factory=dict)
    fused_experts: int = 0
    gated: bool = False
    csf: bool = False


def _layers(
    files: list[Path],
    config: dict[str, Any],
    quant: QuantConfig,
    progress: Callable[[int, int], None],
) -> tuple[ExpertLayer, ...]:
    raw: dict[str, _Raw] = {}
    for done, file in enumerate(files):
        progress(done, len(files))
        for name, info in read_header(file)[0].items():
            _collect(name, info, raw)
    progress(len(files), len(files))
    values, weights = _values(raw)
    layers = []
    last = config.get("num_hidden_layers")
    for prefix in sorted(raw, key=lambda name: (_index(name), name)):
        found = raw[prefix]
        experts = max(len(found.experts), max(found.experts, default=-1) + 1, found.fused_experts)
        halves = ("gate", "up", "down") if found.gated else ("gate", "down")
        scales = {half: values[prefix].get(half, {}) for half in halves}
        draft = (isinstance(last, int) and _index(prefix) >= last) or "mtp" in prefix.lower().split(
            "."
        )
        recipe, verdict = quant.recipe(prefix), judge(experts, scales)
        unequal = _mismatch(weights[prefix])
        layers.append(ExpertLayer(prefix, draft, recipe, experts, verdict, found.csf, unequal))
    return tuple(layers)


def _collect(name: str, info: TensorInfo, raw: dict[str, _Raw]) -> None:
    if ".experts." not in name:
        return
    match = _EXPERT.match(name)
    if match:
        layer = raw.setdefault(match[1], _Raw())
        expert, half, leaf = int(match[2]), _HALF[match[3]], match[4]
        layer.experts.add(expert)
        layer.gated = layer.gated or half == "up"
        layer.csf = layer.csf or leaf == _CSF_STREAM
        if leaf == "input_scale":
            layer.scales[half, expert] = info
        elif leaf == "weight_scale_2" and half != "down":
            layer.weight_scales[half, expert] = info
        return
    match = _FUSED.match(name)
    if match:
        layer = raw.setdefault(match[1], _Raw())
        layer.gated = True
        layer.fused["down" if match[2] in ("down_proj", "w2") else "gate_up"] = info


Values = dict[str, dict[str, dict[int, float]]]
"""layer -> half -> expert -> value."""


def _values(raw: dict[str, _Raw]) -> tuple[Values, Values]:
    """Input scales and weight global scales; reads in the order of the bytes on disk."""
    values: Values = {prefix: {} for prefix in raw}
    weights: Values = {prefix: {} for prefix in raw}
    jobs = [
        (info, into[prefix].setdefault(half, {}), expert)
        for prefix, layer in raw.items()
        for into, infos in ((values, layer.scales), (weights, layer.weight_scales))
        for (half, expert), info in infos.items()
    ]
    reader = ScalarReader()
    try:
        for info, into_half, expert in sorted(jobs, key=lambda job: (job[0].file, job[0].begin)):
            into_half[expert] = _worst(reader.read(info))
        for prefix, layer in raw.items():
            for name, info in layer.fused.items():
                _spread(values[prefix], name, info, reader.read(info), layer)
    finally:
        reader.close()
    return values, weights


def _mismatch(weights: dict[str, dict[int, float]]) -> tuple[int, float]:
    gate, up = weights.get("gate", {}), weights.get("up", {})
    pairs = [(gate[e], up[e]) for e in gate.keys() & up.keys() if gate[e] != up[e]]
    ratios = [max(pair) / min(pair) for pair in pairs if min(pair) > 0]
    return len(pairs), max(ratios, default=1.0)


def _worst(data: tuple[float, ...]) -> float:
    """The value that decides a tensor of one expert: NaN before anything else, then the smallest."""
    return min(data, key=lambda value: (value == value, value), default=math.nan)


def _spread(
    values: dict[str, dict[int, float]],
    name: str,
    info: TensorInfo,
    data: tuple[float, ...],
    layer: _Raw,
) -> None:
    """Input scales of all experts in one tensor: [E], [E, 1], [E, 2] (gate, up), or one for all."""
    columns = info.shape[1] if len(info.shape) > 1 else 1
    rows = len(data) // max(columns, 1)
    if len(data) == 1:
        rows, data = max(len(layer.experts), 1), data * max(len(layer.experts), 1)
    layer.fused_experts = max(layer.fused_experts, rows)
    for column, half in enumerate(("gate", "up") if name == "gate_up" else ("down",)):
        at = min(column, columns - 1)
        values[half] = {row: data[row * columns + at] for row in range(rows)}


def _index(prefix: str) -> int:
    match = _LAYER.search(prefix)
    return int(match[1]) if match else -1
