# SPDX-License-Identifier: Apache-2.0
"""Sizes per layer of a container, an index layout or an ordinary checkpoint; reads headers only."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError, Console
from b12x_overlay.csf.core import ContainerError, Location, ShardError, container
from b12x_overlay.csf.restore import faults, open_checked

_LAYER = re.compile(r"(?P<path>.*?\blayers\.\d+)\.")


@dataclass
class LayerSizes:
    """Bytes of one layer. ``scales`` is what the compressed scales take when plain."""

    layer: str
    other: int = 0
    plain_scales: int = 0
    scales: int = 0
    fixed: int = 0
    exceptions: int = 0

    @property
    def compressed(self) -> int:
        return self.fixed + self.exceptions


def sizes(root: Path) -> tuple[str, list[LayerSizes]]:
    """Kind of checkpoint and the sizes of its layers, in order of appearance by layer number.

    Raises:
        CommandError: not a checkpoint, or a damaged one.
    """
    if (root / container.MANIFEST).exists():
        box = open_checked(root)
        with faults():
            return "container", _group(container.locate(box))
    try:
        locations = container.locate_index(root)
        kind = "index layout" if any(x.exceptions for x in locations) else "ordinary checkpoint"
        return kind, _group(locations)
    except (ContainerError, ShardError) as error:
        raise CommandError(str(error)) from None


def _group(locations: list[Location]) -> list[LayerSizes]:
    weights = {location.name: location.entry for location in locations}
    layers: dict[str, LayerSizes] = {}
    for location in locations:
        match = _LAYER.match(location.name)
        key = match["path"] if match else "(outside layers)"
        layer = layers.setdefault(key, LayerSizes(key))
        if location.exceptions is not None:
            weight = weights.get(location.name.removesuffix(container.SCALE) + ".weight")
            rows, columns = container.scale_shape(location.name, weight)
            layer.scales += rows * columns
            layer.fixed += location.entry.nbytes
            layer.exceptions += location.exceptions.nbytes
        elif location.name.endswith(container.SCALE) and location.entry.dtype == "F8_E4M3":
            layer.plain_scales += location.entry.nbytes
        else:
            layer.other += location.entry.nbytes
    return sorted(layers.values(), key=_order)


def _order(layer: LayerSizes) -> tuple[str, int]:
    head, _, number = layer.layer.rpartition(".")
    return (head, int(number)) if number.isdigit() else (layer.layer, -1)


def show(root: Path, console: Console) -> dict[str, Any]:
    """Print the table and return the same as a document."""
    kind, layers = sizes(root)
    rows = []
    for layer in layers:
        ratio = f"{100 * layer.compressed / layer.scales:.2f} %" if layer.scales else ""
        cells = (layer.other, layer.plain_scales, layer.scales, layer.fixed, layer.exceptions)
        rows.append(
            [layer.layer, *(f"{value / 1e6:.3f}" if value else "" for value in cells), ratio]
        )
    total = {key: sum(getattr(layer, key) for layer in layers) for key in _COLUMNS}
    scales, compressed = total["scales"], total["fixed"] + total["exceptions"]
    ratio = f"{100 * compressed / scales:.2f} %" if scales else ""
    rows.append(["total", *(f"{value / 1e6:.3f}" for value in total.values()), ratio])
    console.say(f"{root}: {kind}; sizes in MB (10^6 bytes)")
    console.table(
        rows,
        [
            "layer",
            "other",
            "plain scales",
            "compressed scales, plain",
            "fixed",
            "exceptions",
            "ratio",
        ],
    )
    return {
        "kind": kind,
        "root": str(root),
        "total": {**total, "ratio": compressed / scales if scales else None},
        "layers": [asdict(layer) for layer in layers],
    }


_COLUMNS = ("other", "plain_scales", "scales", "fixed", "exceptions")
