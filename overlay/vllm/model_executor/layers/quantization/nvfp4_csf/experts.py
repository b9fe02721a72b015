# SPDX-License-Identifier: Apache-2.0
"""What the scales of routed experts need beside them, by the headers: the converter and the server ask the same.

A checkpoint that the server would refuse must not be converted first, which takes as long as reading all of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from .container import SCALE, ContainerError, Location

EXPERT = re.compile(
    r"(?P<module>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>[A-Za-z0-9_]+)\.weight_scale"
)
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))


def check_scalars(scale: Location, by_name: Mapping[str, Location]) -> None:
    """The scale tensor *scale* has a global scale beside it, and perhaps an input scale, of one F32 value each.

    Raises:
        ContainerError: naming file, tensor, found and wanted.
    """
    module = scale.name.removesuffix(SCALE)
    for suffix, optional in ((".weight_scale_2", False), (".input_scale", True)):
        scalar = by_name.get(module + suffix)
        if scalar is None:
            if optional:
                continue
            raise ContainerError(
                f"{scale.shard.path}: {scale.name} has no {module}{suffix} beside it"
            )
        if scalar.entry.dtype != "F32" or scalar.entry.nbytes != 4:
            raise ContainerError(
                f"{scalar.shard.path}: {scalar.name} is {scalar.entry.dtype} {list(scalar.entry.shape)}; "
                "one F32 value is wanted"
            )


def check_complete(
    root: Path, names: Iterable[str], by_name: Mapping[str, Location], what: str
) -> None:
    """A layer's experts are in *names* (scale tensors that match `EXPERT`) with all three projections, or not at all.

    Args:
        what: what the scales in *names* are, for the message.

    Raises:
        ContainerError: naming the layer, how many are missing, and the first.
    """
    modules: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for name in names:
        match = EXPERT.fullmatch(name)
        assert match is not None
        modules[match["module"]].add((int(match["expert"]), match["projection"]))
    for module, found in modules.items():
        missing = [
            f"{module}.{expert}.{projection}{SCALE}"
            for expert in range(max(expert for expert, _ in found) + 1)
            for projection in _projections({projection for _, projection in found})
            if (expert, projection) not in found
        ]
        if missing:
            state = f"are not {what} while others are" if missing[0] in by_name else "are missing"
            raise ContainerError(
                f"{root}: {module}: the scales of {len(missing)} projections {state}, first {missing[0]}"
            )


def _projections(found: set[str]) -> list[str]:
    """Those that an expert with the projections *found* has to have."""
    return sorted(found.union(*(names for names in _GATED if not found.isdisjoint(names))))
