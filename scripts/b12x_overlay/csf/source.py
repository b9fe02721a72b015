# SPDX-License-Identifier: Apache-2.0
"""An ordinary ModelOpt NVFP4 checkpoint: its shards, its other files, and which scales are compressed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.csf.core import (
    ContainerError,
    Location,
    ShardError,
    ShardHeader,
    container,
    experts,
    shards,
)

EXPERT_SCALE = re.compile(
    r"(?P<head>.*?)\blayers\.(?P<layer>\d+)\.(?:[A-Za-z0-9_]+\.)*experts\.\d+\."
    r"(?:gate_proj|up_proj|down_proj|w1|w2|w3)\.weight_scale"
)
# Heads of multi-token-prediction and draft modules, which count their layers from 0 again.
_DRAFT = re.compile(r"(^|\.)(mtp|nextn|draft|eagle)\w*(\.|$)")


@dataclass(frozen=True)
class Source:
    """What `open_source` found.

    Attributes:
        headers: the shards, in file-name order.
        compressed: name of every scale tensor to compress, with its logical shape ``[N, K / 16]``.
        others: files beside the shards, carried along as they are.
        left_behind: sub-folders, hidden files and dangling links beside them.
        config: config.json.
    """

    root: Path
    headers: list[ShardHeader]
    compressed: dict[str, tuple[int, int]]
    others: list[Path]
    left_behind: list[Path]
    config: dict[str, Any]

    @property
    def total_bytes(self) -> int:
        return sum(header.file_bytes for header in self.headers)

    @property
    def scale_bytes(self) -> int:
        return sum(rows * columns for rows, columns in self.compressed.values())


def open_source(root: Path) -> Source:
    """Take stock of the checkpoint *root*; reads headers only and writes nothing.

    Raises:
        CommandError: not an ordinary NVFP4 checkpoint, or a damaged one.
    """
    if _is_container(root):
        raise CommandError(
            f"{root} is a CSF container already",
            hint="give an ordinary checkpoint, or use --restore, --verify or --info",
        )
    config = read_config(root)
    try:
        locations = container.locate_index(root)
    except (ContainerError, ShardError) as error:
        raise CommandError(str(error), hint="download the checkpoint again") from None
    if any(location.exceptions for location in locations):
        raise CommandError(
            f"{root} holds CSF streams already (the index layout)",
            hint="serve it as it is with --load-format nvfp4_csf",
        )
    headers = {location.shard.path: location.shard for location in locations}
    ordered = [headers[path] for path in sorted(headers)]
    chosen = _select(root, locations, config)
    return Source(root, ordered, chosen, *_others(root, set(headers)), config)


def _is_container(root: Path) -> bool:
    """A file called manifest.json is no proof: other tools write one, too."""
    manifest = root / container.MANIFEST
    if not manifest.is_file():
        return False
    return (
        root / container.CONTRACT
    ).exists() or container.SCHEMA.encode() in manifest.read_bytes()


def read_config(root: Path) -> dict[str, Any]:
    """config.json of *root*.

    Raises:
        CommandError: no such folder or file, or not JSON.
    """
    path = root / "config.json"
    if not root.is_dir():
        raise CommandError(f"{root}: no such folder")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CommandError(f"{path}: missing; {root} is not a checkpoint folder") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CommandError(f"{path}: a JSON object is wanted")
    return config


def hidden_layers(root: Path, config: dict[str, Any]) -> int:
    """``num_hidden_layers`` of the (text) model; layers from there on are MTP layers and stay as they are."""
    for part in (config.get("text_config"), config):
        if isinstance(part, dict) and isinstance(part.get("num_hidden_layers"), int):
            return int(part["num_hidden_layers"])
    raise CommandError(
        f"{root / 'config.json'}: no num_hidden_layers; it says which experts are the main model's"
    )


def expert_layer(name: str) -> int | None:
    """Layer of an expert's scale tensor of the main model's numbering, else None."""
    match = EXPERT_SCALE.fullmatch(name)
    if match is None or _DRAFT.search(match["head"]):
        return None
    return int(match["layer"])


def _select(
    root: Path, locations: list[Location], config: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    layers = hidden_layers(root, config)
    by_name = {location.name: location for location in locations}
    chosen: dict[str, tuple[int, int]] = {}
    for location in locations:
        layer = expert_layer(location.name)
        entry = location.entry
        if layer is None or layer >= layers or entry.dtype != "F8_E4M3":
            continue
        try:
            shape = container.check_geometry_of(location, by_name)
            if entry.shape != shape:
                raise CommandError(
                    f"{location.shard.path}: {location.name} is {list(entry.shape)}, its weight asks for {list(shape)}"
                )
            experts.check_scalars(location, by_name)
        except ContainerError as error:
            raise CommandError(
                str(error), hint="only ModelOpt NVFP4 experts with group size 16 can be compressed"
            ) from None
        chosen[location.name] = shape
    if not chosen:
        raise CommandError(
            f"{root}: no NVFP4 expert scales below layer {layers} (F8_E4M3, ...experts.N.*_proj.weight_scale)",
            hint="check that this is a ModelOpt NVFP4 mixture-of-experts checkpoint",
        )
    try:
        experts.check_complete(root, chosen, by_name, "F8_E4M3")
    except ContainerError as error:
        raise CommandError(
            str(error),
            hint="a layer's experts are compressed together: download or make the checkpoint again",
        ) from None
    return chosen


def _others(root: Path, used: set[Path]) -> tuple[list[Path], list[Path]]:
    """What the folder itself holds besides the shards in use: files to carry along, and what stays behind.

    Raises:
        CommandError: a file name that is no text, which the container's JSON documents cannot name.
    """
    carried: list[Path] = []
    left: list[Path] = []
    for path in sorted(root.iterdir()):
        if path in used:
            continue
        try:
            path.name.encode()
        except UnicodeEncodeError:
            raise CommandError(f"{path}: the file's name is not UTF-8", hint="rename it") from None
        is_carried = path.is_file() and not path.name.startswith(".")
        (carried if is_carried else left).append(path)
    return carried, left


__all__ = ["Source", "expert_layer", "hidden_layers", "open_source", "read_config", "shards"]
