# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's quantization config: which recipe each expert layer has, as vLLM 0.33.0 resolves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

UNQUANTIZED = "unquantized"
CSF_METHOD = "nvfp4_csf"


@dataclass(frozen=True)
class QuantConfig:
    """What the checkpoint says.

    Attributes:
        method: "modelopt", "compressed-tensors", ... or "" for none. For a served CSF container the method of its
            source config.
        algo: "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION", ... upper case, "" where the method has none.
        csf: "" (plain scales), "container" (quant_method nvfp4_csf) or "index" (weight_scale_encoding csf).
        checkpoint_root: of a served container.
        layers: ``quantized_layers`` of a mixed config.
        ignored: ``ignore`` / ``exclude_modules``.
    """

    method: str = ""
    algo: str = ""
    csf: str = ""
    checkpoint_root: str = ""
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def recipe(self, prefix: str) -> str:
        """The recipe of the expert layer *prefix* ("model.layers.3.mlp.experts")."""
        if not self.method:
            return UNQUANTIZED
        if any(pattern in prefix or fnmatch(prefix, pattern) for pattern in self.ignored):
            return UNQUANTIZED
        if self.algo == "MIXED_PRECISION":
            return self._mixed(prefix)
        return self.algo or self.method

    def _mixed(self, prefix: str) -> str:
        """Exact entry, then an entry below the prefix, then one below its parent: vLLM's order for experts."""
        parent = prefix.removesuffix(".experts")
        if prefix in self.layers:
            return _algo(self.layers[prefix])
        for start in (prefix + ".", parent + "."):
            for name, entry in self.layers.items():
                if name.startswith(start):
                    return _algo(entry)
        return UNQUANTIZED


def read(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> QuantConfig:
    """From ``config.json`` (root or ``text_config``) and, if that has none, ``hf_quant_config.json``."""
    text = config.get("text_config")
    entry = config.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
    if not isinstance(entry, dict):
        entry = {"quant_method": "modelopt", **hf_quant_config} if hf_quant_config else None
    if not entry:
        return QuantConfig()
    if entry.get("quant_method") == CSF_METHOD:
        source = entry.get("source_quantization_config")
        inner = (
            read({"quantization_config": source}, None)
            if isinstance(source, dict)
            else QuantConfig()
        )
        root = str(entry.get("checkpoint_root", ""))
        return QuantConfig(inner.method, inner.algo, "container", root, inner.layers, inner.ignored)
    nested = entry.get("quantization")
    inner_entry: dict[str, Any] = nested if isinstance(nested, dict) else entry
    method = str(entry.get("quant_method", "")).lower()
    algo = str(inner_entry.get("quant_algo", "")).upper() if method.startswith("modelopt") else ""
    if algo == "NVFP4" and _weights_only(entry.get("config_groups")):
        algo = "W4A16_NVFP4"
    layers = inner_entry.get("quantized_layers") or {}
    ignored = inner_entry.get("ignore") or inner_entry.get("exclude_modules") or []
    encoded = any(
        isinstance(e, dict) and e.get("weight_scale_encoding") == "csf" for e in layers.values()
    )
    return QuantConfig(
        method,
        algo,
        "index" if encoded else "",
        "",
        {name: e for name, e in layers.items() if isinstance(e, dict)},
        tuple(str(pattern) for pattern in ignored),
    )


def _weights_only(groups: object) -> bool:
    """An export that says NVFP4 but quantizes no activation: vLLM takes it for W4A16_NVFP4."""
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(
            isinstance(group, dict) and group.get("input_activations") is None
            for group in groups.values()
        )
    )


def _algo(entry: Mapping[str, Any]) -> str:
    return str(entry.get("quant_algo", "")).upper()
