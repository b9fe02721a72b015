# SPDX-License-Identifier: Apache-2.0
"""How a CSF checkpoint presents itself to vLLM: as its source, with one extra key.

vLLM compares quantization names and config classes in many places (Qwen's MTP layers, mixed precision, fusion
defaults, ``is_nvfp4_quantized``). A CSF checkpoint must get the answers that its source gets, so its config is turned
into the source's where vLLM normalises quantization configs: ``{"quant_method": "nvfp4_csf", "checkpoint_root": ...,
"source_quantization_config": {...}}`` becomes the source's dict plus `KEY`, before anyone reads it. The config
object that vLLM then builds is the source's own class; `attach` gives it the attribute ``nvfp4_csf``. The index
layout, ModelOpt MIXED_PRECISION whose layers say ``"weight_scale_encoding": "csf"``, only gets the key.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

METHOD = "nvfp4_csf"
KEY = "nvfp4_csf"
_ENCODING = "weight_scale_encoding"
_VERSION = 1


@dataclass(frozen=True)
class CsfCheckpoint:
    """Where the streams of a model are: a container, or a model folder in the index layout.

    Attributes:
        root: the container, or the model's folder.
        model: the model path whose quantization config says so.
    """

    root: Path
    is_container: bool
    model: str = field(default="", compare=False)


def normalize(quant_cfg: dict[str, Any]) -> None:
    """Rewrite a CSF checkpoint's quantization config in place; leave every other one alone. Idempotent.

    Raises:
        ValueError: a key missing or of the wrong kind, another format version, an unknown scale encoding.
    """
    if KEY in quant_cfg:
        return
    if str(quant_cfg.get("quant_method", "")).lower() == METHOD:
        _unwrap(quant_cfg)
    elif _is_csf_encoded(quant_cfg):
        quant_cfg[KEY] = {"layout": "index"}


def attach(
    quant_config: QuantizationConfig, config: dict[str, Any], model: str
) -> QuantizationConfig:
    """Tell *quant_config*, which vLLM built from *config*, that it describes a CSF checkpoint, if it does.

    Args:
        model: the model's path, where the index layout has its tensors.

    Raises:
        ValueError: the source is not ModelOpt, or the model is not a local folder.
    """
    from vllm.model_executor.layers.quantization.modelopt import ModelOptQuantConfigBase

    checkpoint = describe(config, model)
    if checkpoint is None:
        return quant_config
    if not isinstance(quant_config, ModelOptQuantConfigBase):
        raise ValueError(
            f"NVFP4-CSF checkpoints come from ModelOpt NVFP4 ones, this one's source config is "
            f"{quant_config.get_name()}: convert a ModelOpt checkpoint."
        )
    quant_config.nvfp4_csf = checkpoint  # type: ignore[attr-defined]
    return quant_config


def describe(config: dict[str, Any], model: str) -> CsfCheckpoint | None:
    """Where a CSF checkpoint with this quantization *config* has its tensors, or None for any other one.

    Raises:
        ValueError: see `normalize`, and for an index layout that is not a local folder.
    """
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    config = copy.deepcopy(config)
    normalize(config)
    description = config.get(KEY)
    if description is None:
        return None
    if description["layout"] == "container":
        return CsfCheckpoint(Path(description["checkpoint_root"]), True, model)
    if not Path(model).is_dir():
        raise ValueError(
            f"{model} is not a local folder: download the NVFP4-CSF checkpoint and serve it by its path."
        )
    return CsfCheckpoint(Path(model).absolute(), False, model)


def checkpoint_of(quant_config: Any) -> CsfCheckpoint | None:
    """The CSF checkpoint that *quant_config* describes, or None."""
    return getattr(quant_config, "nvfp4_csf", None)


class Nvfp4CsfConfig(QuantizationConfig):
    """What the name ``nvfp4_csf`` is registered as. It only makes the source's config; see the module's text."""

    def __init__(self) -> None:
        raise ValueError(
            f"--quantization {METHOD} needs a CSF checkpoint: give a folder that `convert-csf --serving-folder` made."
        )

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 120

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        """Never called: there are no objects of this class."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None
    ) -> None:
        """Refuse ``--quantization nvfp4_csf`` for any other checkpoint; the source's class does the choosing."""
        if user_quant == METHOD and KEY not in (hf_quant_cfg or {}):
            raise ValueError(
                f"--quantization {METHOD} needs a CSF checkpoint and this is an ordinary one: drop the option, and set "
                "VLLM_B12X_CSF_COMPRESS=1 to compress its scales at load."
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """The source's config object for a CSF checkpoint's *config* (wrapped or normalised)."""
        from vllm.model_executor.layers.quantization import get_quantization_config
        from vllm.model_executor.layers.quantization.modelopt import (
            ModelOptMixedPrecisionConfig,
            ModelOptNvFp4Config,
        )

        config = copy.deepcopy(config)
        normalize(config)
        for candidate in (ModelOptNvFp4Config, ModelOptMixedPrecisionConfig):
            name = candidate.override_quantization_method(config, None)
            if name is not None:
                made = get_quantization_config(name).from_config(config)
                return attach(made, config, "")
        raise ValueError(
            f"NVFP4-CSF checkpoints come from ModelOpt NVFP4 ones; source_quantization_config says "
            f"{config.get('quant_method')!r} {config.get('quant_algo')!r}."
        )


def _unwrap(quant_cfg: dict[str, Any]) -> None:
    version = quant_cfg.get("format_version")
    if version != _VERSION:
        raise ValueError(
            f"{METHOD}: format_version is {version!r} and this vLLM reads {_VERSION}: convert the checkpoint again."
        )
    root = quant_cfg.get("checkpoint_root")
    if not isinstance(root, str) or "://" in root or not Path(root).is_absolute():
        raise ValueError(
            f"{METHOD}: checkpoint_root is {root!r}: it has to be the container's absolute path on this machine; make "
            "the folder again with `convert-csf --serving-folder`."
        )
    source = quant_cfg.get("source_quantization_config")
    if not isinstance(source, dict):
        raise ValueError(
            f"{METHOD}: source_quantization_config is {source!r}: the source's quantization config has to be there; make "
            "the folder again with `convert-csf --serving-folder`."
        )
    source = copy.deepcopy(source)
    quant_cfg.clear()
    quant_cfg.update(source)
    quant_cfg[KEY] = {"layout": "container", "checkpoint_root": root}


def _is_csf_encoded(quant_cfg: dict[str, Any]) -> bool:
    """Whether any layer's scales are stored in CSF.

    Raises:
        ValueError: an encoding that nobody here can read; served anyway, it would be misread in silence.
    """
    nested = quant_cfg.get("quantization")
    holder = nested if isinstance(nested, dict) else quant_cfg
    layers = holder.get("quantized_layers")
    found = False
    for name, recipe in layers.items() if isinstance(layers, dict) else ():
        encoding = recipe.get(_ENCODING) if isinstance(recipe, dict) else None
        if encoding not in (None, "csf"):
            raise ValueError(
                f"{name}: {_ENCODING} is {encoding!r} and this vLLM reads 'csf': use a build that knows it."
            )
        found |= encoding == "csf"
    return found
