# SPDX-License-Identifier: Apache-2.0
"""What the server is: model, versions, variables and patch set, by allow-list and redacted.

Sources, each optional but the first:

* ``/v1/models`` and ``/version`` of the server;
* ``/server_info?config_format=json``, which vLLM offers with ``VLLM_SERVER_DEV_MODE=1``;
* a JSON file given with ``--identity``: the manifest that the beta image carries, or the output of
  ``scripts/doctor --json``, or any object with the keys described in `from_document`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.errors import UsageError
from b12x_overlay.qualify.faults import Fault
from b12x_overlay.qualify.probe import Server
from b12x_overlay.qualify.redact import model_name, redact
from b12x_overlay.qualify.schema import Identity

VARIABLES = (
    "B12X_W4A16_A4_PREFILL_MIN_TOKENS",
    "VLLM_B12X_A4_KEEP_PACKED",
    "VLLM_B12X_A4_PREFILL_EAGER",
    "VLLM_B12X_CSF_COMPRESS",
    "VLLM_B12X_CSF_SCALE_PREFETCH",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_USE_V2_MODEL_RUNNER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Environment variables that change what is measured; no other variable is recorded."""

PACKAGES = (
    "vllm",
    "torch",
    "flashinfer",
    "flashinfer-python",
    "b12x",
    "nvidia-cutlass-dsl",
    "cutlass-dsl",
    "triton",
    "cuda",
    "driver",
)
"""Packages whose versions are recorded."""

_SETTINGS = (
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "decode_context_parallel_size"),
    ("parallel_config", "data_parallel_size"),
    ("scheduler_config", "max_num_seqs"),
    ("scheduler_config", "max_num_batched_tokens"),
    ("speculative_config", "method"),
    ("speculative_config", "num_speculative_tokens"),
    ("model_config", "quantization"),
    ("model_config", "dtype"),
    ("model_config", "enforce_eager"),
    ("kernel_config", "moe_backend"),
    ("cache_config", "cache_dtype"),
    ("cache_config", "enable_prefix_caching"),
)
_MANIFEST_TEXT = (
    "id",
    "content_id",
    "patch_set",
    "patchset",
    "version",
    "commit",
    "architecture",
    "arch",
    "base",
    "base_image",
    "base_digest",
    "provider",
    "line",
    "tag",
    "verdict",
    "state",
)
_MANIFEST_LISTS = ("patches", "fragments", "changes", "gpus")
_VERSION_KEYS = ("versions", "packages")
_SAFE_VALUE = re.compile(r"[\w.,:+-]{1,64}")


async def gather(client: Client, server: Server, document: Mapping[str, Any] | None) -> Identity:
    """Collect what can be known; a source that fails is left out."""
    identity = Identity(
        model=model_name(server.model), max_model_len=server.max_model_len, sources=["/v1/models"]
    )
    try:
        version = (await client.get_json("/version")).get("version")
        if isinstance(version, str):
            identity.versions["vllm"] = redact(version)
            identity.sources.append("/version")
    except Fault:
        pass
    try:
        _from_server_info(identity, await client.get_json("/server_info?config_format=json"))
        identity.sources.append("/server_info")
    except Fault:
        pass
    if document is not None:
        from_document(identity, document)
        identity.sources.append("identity file")
    return identity


def read_document(path: Path) -> dict[str, Any]:
    """Read an identity file.

    Raises:
        UsageError: unreadable, not JSON, no object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON: {error}. Give the image's manifest or 'scripts/doctor --json' output."
        ) from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds {type(document).__name__}, not an object")
    return document


def from_document(identity: Identity, document: Mapping[str, Any]) -> None:
    """Take over what is known from a manifest or a doctor report; everything else is dropped.

    Keys, at the top or one level below: ``versions``/``packages`` (name to version), ``environment``/``env``
    (variable to value), ``gpus`` (names, or objects with ``name``), ``patches``/``fragments`` (ids, or objects with
    ``name`` or ``id``), and texts such as ``content_id``, ``base_digest``, ``architecture``, ``provider``.
    """
    levels = [document, *(value for value in document.values() if isinstance(value, Mapping))]
    for level in levels:
        for key in _VERSION_KEYS:
            _versions(identity, level.get(key))
        for key in ("environment", "env", "variables"):
            _environment(identity, level.get(key))
        for key in _MANIFEST_LISTS:
            names = _names(level.get(key))
            if key == "gpus":
                identity.gpus = names or identity.gpus
            elif names:
                identity.manifest[key] = names
        for key in _MANIFEST_TEXT:
            value = level.get(key)
            if isinstance(value, str) and value and key not in identity.manifest:
                identity.manifest[key] = redact(value)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The given variables with values fit for a report: a value that is no plain word becomes ``<set>``."""
    return {
        name: value if _SAFE_VALUE.fullmatch(value) else "<set>" if value else ""
        for name, value in variables.items()
    }


def differences(one: Identity, other: Identity) -> list[str]:
    """What differs between two identities, as text; empty if they describe the same server."""
    found = []
    first, second = one.model_dump(exclude={"sources"}), other.model_dump(exclude={"sources"})
    for field, value in first.items():
        if value != second[field]:
            found.append(f"{field}: {value!r} / {second[field]!r}")
    return found


def _from_server_info(identity: Identity, info: Mapping[str, Any]) -> None:
    _environment(identity, info.get("vllm_env"))
    config = info.get("vllm_config")
    if isinstance(config, Mapping):
        for section, key in _SETTINGS:
            part = config.get(section)
            value = part.get(key) if isinstance(part, Mapping) else None
            if isinstance(value, (str, int, float, bool)):
                identity.settings[key] = redact(str(value))
    system = info.get("system_env")
    if isinstance(system, Mapping):
        for key, name in (
            ("torch_version", "torch"),
            ("cuda_runtime_version", "cuda"),
            ("nvidia_driver_version", "driver"),
        ):
            if isinstance(system.get(key), str):
                identity.versions[name] = redact(system[key])
        models = system.get("nvidia_gpu_models")
        if isinstance(models, str):
            # "GPU 0: NVIDIA RTX PRO 6000 (UUID: GPU-...)"; the UUID names one machine
            names = [
                re.sub(r"^GPU \d+:\s*|\s*\(UUID.*?\)", "", line.strip())
                for line in models.splitlines()
            ]
            identity.gpus = [redact(name) for name in names if name]


def _versions(identity: Identity, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, version in value.items():
            if isinstance(version, str) and str(name).lower() in PACKAGES:
                identity.versions[str(name).lower()] = redact(version)


def _environment(identity: Identity, value: Any) -> None:
    if isinstance(value, Mapping):
        known = {name: str(value[name]) for name in VARIABLES if value.get(name) is not None}
        identity.environment |= environment(known)


def _names(value: Any) -> list[str]:
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        return []
    names = []
    for item in value:
        name = item.get("name") or item.get("id") if isinstance(item, Mapping) else item
        if isinstance(name, str):
            names.append(redact(re.sub(r"\s*\(UUID.*?\)", "", name)))
    return names
