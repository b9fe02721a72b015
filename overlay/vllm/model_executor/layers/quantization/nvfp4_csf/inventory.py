# SPDX-License-Identifier: Apache-2.0
"""What a CSF checkpoint holds, from its headers: which layers are compressed, and that nothing is missing.

Everything that headers can tell is checked here, before any weight is read: pairs of streams, their lengths, weights
and scalars beside them with the right dtypes, every expert and projection of a layer.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from vllm.model_executor.layers.quantization.nvfp4_csf.codec import fixed_bytes
from vllm.model_executor.layers.quantization.nvfp4_csf.config import CsfCheckpoint
from vllm.model_executor.layers.quantization.nvfp4_csf.container import (
    INDEX,
    MANIFEST,
    ContainerError,
    Location,
    Place,
    check_geometry_of,
    locate,
    locate_index,
    open_container,
)
from vllm.model_executor.layers.quantization.nvfp4_csf.experts import (
    EXPERT,
    check_complete,
    check_scalars,
)

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_DRAFT = re.compile(r"(^|\.)(mtp|nextn|draft|eagle)\w*\.")

LayerKey = tuple[bool, int]
"""Whether a layer belongs to a module that numbers its own layers (MTP), and its number."""


@dataclass(frozen=True)
class Inventory:
    """The tensors of a checkpoint.

    Attributes:
        files: shards in the order of the manifest or index.
        shapes: logical ``[N, K / 16]`` of every compressed scale tensor, by its original name.
        places: where their streams lie.
        layers: keys of the layers whose experts are compressed.
    """

    files: tuple[Path, ...]
    shapes: dict[str, tuple[int, int]]
    places: dict[str, Place]
    layers: frozenset[LayerKey]


def layer_key(name: str) -> LayerKey | None:
    """Key of the decoder layer that a tensor or module *name* belongs to, in checkpoint and vLLM naming alike."""
    match = _LAYER.search(name)
    return (bool(_DRAFT.search(name[: match.start()])), int(match[1])) if match else None


def take_inventory(checkpoint: CsfCheckpoint) -> Inventory:
    """Read every header of *checkpoint* and check what can be checked.

    Cached while the manifest or index stays the same: every layer asks, and draft and target share a checkpoint.

    Raises:
        ContainerError, ShardError: see the messages; each names the file and tensor.
    """
    path = checkpoint.root / (MANIFEST if checkpoint.is_container else INDEX)
    try:
        state = path.stat()
    except OSError:
        return _take(checkpoint, None)
    return _take(checkpoint, (state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=4)
def _take(checkpoint: CsfCheckpoint, stamp: tuple[int, int] | None) -> Inventory:
    if checkpoint.is_container:
        locations = locate(open_container(checkpoint.root))
    else:
        locations = locate_index(checkpoint.root)
    by_name = {location.name: location for location in locations}
    shapes = {
        location.name: _check_scale(location, by_name)
        for location in locations
        if location.exceptions is not None
    }
    if not shapes:
        raise ContainerError(
            f"{checkpoint.root}: no compressed scales in it; serve it as an ordinary checkpoint"
        )
    places = {location.name: location.place for location in locations if location.name in shapes}
    check_complete(checkpoint.root, shapes, by_name, "compressed")
    keys = (layer_key(name) for name in shapes)
    files = dict.fromkeys(location.shard.path for location in locations)
    return Inventory(
        tuple(files), shapes, places, frozenset(key for key in keys if key is not None)
    )


def _check_scale(location: Location, by_name: dict[str, Location]) -> tuple[int, int]:
    name, path = location.name, location.shard.path
    if EXPERT.fullmatch(name) is None or layer_key(name) is None:
        raise ContainerError(
            f"{path}: {name} is compressed, but only scales of routed experts may be"
        )
    rows, columns = check_geometry_of(location, by_name)
    wanted = fixed_bytes(rows, columns)
    if location.entry.nbytes != wanted:
        raise ContainerError(
            f"{path}: {location.entry.name} has {location.entry.nbytes} bytes, {wanted} are wanted"
        )
    check_scalars(location, by_name)
    return rows, columns
