# SPDX-License-Identifier: Apache-2.0
"""``--load-format nvfp4_csf``: vLLM's default loader over the checkpoint's shards, streams joined on the way.

All ordinary tensors (attention, embeddings, MTP layers, FP4 weights, global scales) pass through untouched. The two
streams of a compressed scale tensor leave as one packed tensor under the original name, and only for layers of the
model being loaded that want them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.nvfp4_csf.config import (
    METHOD,
    CsfCheckpoint,
    checkpoint_of,
    describe,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.container import (
    EXCEPTIONS,
    FIXED,
    MANIFEST,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.inventory import (
    Inventory,
    LayerKey,
    layer_key,
    take_inventory,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.settings import COMPRESS
from vllm.model_executor.layers.quantization.nvfp4_csf.streams_loader import pack
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

logger = init_logger(__name__)

Weights = Iterator[tuple[str, torch.Tensor]]


class Nvfp4CsfModelLoader(DefaultModelLoader):
    """Reads a container or the index layout. A draft model in an ordinary folder loads as with ``auto``."""

    _inventory: Inventory | None = None
    _root: str = ""
    _wanted: frozenset[LayerKey] = frozenset()

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """All tensors of the checkpoint for *model*.

        What can be refused is refused by the call, not at the first tensor: a reload has not touched the model yet.

        Raises:
            ValueError: not a CSF checkpoint; the message says what it is instead.
            ContainerError, ShardError: a damaged one.
        """
        checkpoint = _checkpoint(model, model_config)
        if checkpoint is None:
            if model_config.runner_type != "draft":
                raise ValueError(_no_csf(model_config.model))
            logger.info(
                "%s is an ordinary checkpoint: its draft model loads as with --load-format auto",
                model_config.model,
            )
            self._inventory = None
            return super().get_all_weights(model_config, model)
        if getattr(model, "secondary_weights", ()):
            raise ValueError(
                f"{model_config.model}: {type(model).__name__} reads further weight files, which a CSF serving folder does "
                f"not carry: serve the ordinary checkpoint, with {COMPRESS}=1 to compress its scales at load."
            )
        self._inventory = take_inventory(checkpoint)
        self._root = str(checkpoint.root)
        self._wanted = _wanted_layers(model)
        return super().get_all_weights(model_config, model)

    def _prepare_weights(
        self, model_name_or_path: str, *args: Any, **kwargs: Any
    ) -> tuple[str, list[str], bool, str]:
        if self._inventory is None:
            return DefaultModelLoader(_as_auto(self.load_config))._prepare_weights(
                model_name_or_path, *args, **kwargs
            )
        return (
            self._root,
            [str(path) for path in self._inventory.files],
            True,
            "model.safetensors.index.json",
        )

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        weights = super()._get_weights_iterator(source)
        if self._inventory is None:
            return weights
        return join_streams(weights, self._inventory, self._wanted, source.prefix)


def join_streams(
    weights: Weights,
    inventory: Inventory,
    wanted: frozenset[LayerKey],
    prefix: str = "",
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Pass plain tensors through, turn pairs of streams into packed ones; the halves may come in any order.

    Raises:
        ValueError: a stream without its other half.
    """
    halves: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in weights:
        suffix = next((s for s in (FIXED, EXCEPTIONS) if name.endswith(s)), None)
        if suffix is None:
            yield name, tensor
            continue
        original = name.removesuffix(suffix)
        if layer_key(original) not in wanted:
            continue
        if original not in halves:
            halves[original] = suffix, tensor
            continue
        other, half = halves.pop(original)
        if other == suffix:
            raise ValueError(f"{name}: given twice")
        fixed, exceptions = (tensor, half) if suffix == FIXED else (half, tensor)
        name = original.removeprefix(prefix)
        yield original, pack(fixed, exceptions, *inventory.shapes[name], inventory.places[name])
    if halves:
        name, (suffix, _) = next(iter(halves.items()))
        raise ValueError(f"{name}{suffix} came without its other half ({len(halves)} such tensors)")


def _no_csf(model: str) -> str:
    """What *model* is, where a CSF checkpoint is wanted."""
    folder = Path(model)
    wanted = f"--load-format {METHOD} (or the reload) needs a CSF checkpoint"
    if not folder.is_dir():
        return f"{model}: {wanted} and this is no folder on this machine: give a folder that `convert-csf --serving-folder` made."
    if (folder / MANIFEST).is_file():
        return f"{model}: this is a container: give the folder that `convert-csf --serving-folder` made from it."
    return (
        f"{model}: {wanted} and this is an ordinary one: drop the option, or give a folder that `convert-csf "
        "--serving-folder` made."
    )


def _checkpoint(model: nn.Module, model_config: ModelConfig) -> CsfCheckpoint | None:
    """Where the tensors are: by the folder's own config.json, because a reload may name another folder.

    A quantization config that is not in config.json (``hf_quant_config.json``, ``--hf-overrides``) is found on the
    model's modules, and counts for the path it was read from: not for another folder, not for a draft head that runs
    under its target's config.
    """
    folder = Path(model_config.model)
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    text_config = config.get("text_config") or {}
    quantization = config.get("quantization_config") or text_config.get("quantization_config")
    if isinstance(quantization, dict):
        found = describe(quantization, str(folder))
        if found is not None:
            return found
    for module in model.modules():
        found = checkpoint_of(getattr(module, "quant_config", None))
        if found is not None and found.model == str(model_config.model):
            return found
    return None


def _wanted_layers(model: nn.Module) -> frozenset[LayerKey]:
    from vllm.model_executor.layers.quantization.nvfp4_csf.method import (
        CsfStreamsModelOptNvFp4FusedMoE,
    )

    keys = (
        layer_key(module.layer_name)
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), CsfStreamsModelOptNvFp4FusedMoE)
    )
    return frozenset(key for key in keys if key is not None)


def _as_auto(load_config: Any) -> Any:
    return dataclasses.replace(load_config, load_format="auto")
