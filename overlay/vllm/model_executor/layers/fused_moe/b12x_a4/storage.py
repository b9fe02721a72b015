# SPDX-License-Identifier: Apache-2.0
"""Weight reload into the storage of the first load.

Captured CUDA graphs hold the addresses of everything a prepared weight set owns: weights and block scales, but also
global scales, alphas, activation scales and the W4A16 kernels' lock words. A reload therefore prepares the new weights
and copies them into the first load's tensors.

vLLM's ``reuse_packed_weight_storage`` cannot do this for a dual plan: it compares every dataclass field, among them the
version number behind b12x's proof that FC1's input scale is one value. Copying into ``a1_gscale`` changes that number,
so the second reload would silently keep both copies of the weights and leave captured graphs on the old one; and
without a renewed proof the next A4 call raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


class ReloadError(RuntimeError):
    """The new weights cannot take the old ones' place; the message names the tensor or field."""


@torch.no_grad()
def reuse_storage(current: Any, replacement: Any, layer_name: str) -> Any:
    """Copy *replacement* (prepared experts) into *current*'s tensors and return *current* with its proof renewed.

    Raises:
        ReloadError: shape, stride, dtype, device or a plain field differs; nothing has been copied then.
    """
    if current is None or current is replacement:
        return replacement
    pairs = list(_tensor_pairs(current, replacement, layer_name, "prepared experts"))
    for old, new in pairs:
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
    # replace() runs b12x's __post_init__ again, on the same tensors: same addresses, new proof.
    return dataclasses.replace(current)


def _tensor_pairs(
    current: Any, replacement: Any, layer_name: str, path: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(current, torch.Tensor) and isinstance(replacement, torch.Tensor):
        for name in ("shape", "dtype", "device"):
            if getattr(current, name) != getattr(replacement, name):
                _refuse(
                    layer_name, f"{path}.{name}", getattr(current, name), getattr(replacement, name)
                )
        if current.stride() != replacement.stride():
            _refuse(layer_name, f"{path}.stride", current.stride(), replacement.stride())
        yield current, replacement
    elif dataclasses.is_dataclass(current) and type(current) is type(replacement):
        for field in dataclasses.fields(current):
            if field.init:  # the others are derived, among them the proof's version number
                yield from _tensor_pairs(
                    getattr(current, field.name),
                    getattr(replacement, field.name),
                    layer_name,
                    f"{path}.{field.name}",
                )
    elif isinstance(current, torch.Tensor) or current != replacement:
        _refuse(layer_name, path, current, replacement)


def _refuse(layer_name: str, what: str, old: Any, new: Any) -> None:
    raise ReloadError(
        f"{layer_name}: reloaded weights differ in {what} ({_short(old)} before, {_short(new)} now), so they cannot "
        "take the place that captured CUDA graphs read. Restart the server to serve them."
    )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
