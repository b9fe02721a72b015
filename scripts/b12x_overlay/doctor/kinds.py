# SPDX-License-Identifier: Apache-2.0
"""The kinds of the fields of a checkpoint's config files that doctor goes into; vLLM cannot read others either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from b12x_overlay.doctor.safetensors import CheckpointError

CONFIG: dict[str, type] = {"architectures": list, "quantization_config": dict, "text_config": dict}
QUANTIZATION: dict[str, type] = {
    "quantization": dict, "quantized_layers": dict, "config_groups": dict, "source_quantization_config": dict,
    "ignore": list, "exclude_modules": list,
}  # fmt: skip
_INSIDE: dict[str, dict[str, type]] = {
    "text_config": CONFIG, "quantization_config": QUANTIZATION, "quantization": QUANTIZATION,
    "source_quantization_config": QUANTIZATION,
}  # fmt: skip
_WORDS: dict[type, str] = {list: "a list", dict: "an object"}


def check(path: Path, value: dict[str, Any], kinds: dict[str, type], where: str = "") -> None:
    """Compare *value* of the file *path*, of which *where* says the part, with *kinds*.

    Raises:
        CheckpointError: a field has another kind; absent and null ones are fine.
    """
    for name, kind in kinds.items():
        inner = value.get(name)
        if inner is None:
            continue
        if not isinstance(inner, kind):
            raise CheckpointError(f"{path}: {where}{name} is {inner!r:.60}, wanted {_WORDS[kind]}")
        if name in _INSIDE:
            check(path, value[name], _INSIDE[name], f"{where}{name}.")
