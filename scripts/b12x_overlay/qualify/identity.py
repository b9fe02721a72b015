# SPDX-License-Identifier: Apache-2.0
"""What the server is: model, versions, variables and patch set, by allow-list and redacted.

Sources, each optional but the first: ``/v1/models``; ``/version``; ``/server_info?config_format=json``, which vLLM
offers with ``VLLM_SERVER_DEV_MODE=1``; the files given with ``--identity`` (see `documents`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.documents import Document, take
from b12x_overlay.qualify.faults import Fault
from b12x_overlay.qualify.probe import Server
from b12x_overlay.qualify.redact import model_name, redact
from b12x_overlay.qualify.schema import Identity
from b12x_overlay.qualify.variables import chosen

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


async def gather(client: Client, server: Server, documents: Sequence[Document]) -> Identity:
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
    for document in documents:
        take(identity, document)
        identity.sources.append(str(document["schema"]))
    return identity


def differences(one: Identity, other: Identity) -> list[str]:
    """What differs between two identities, as text; empty if they describe the same server."""
    found = []
    first, second = one.model_dump(exclude={"sources"}), other.model_dump(exclude={"sources"})
    for field, value in first.items():
        if value != second[field]:
            found.append(f"{field}: {value!r} / {second[field]!r}")
    return found


def _from_server_info(identity: Identity, info: Mapping[str, Any]) -> None:
    variables = info.get("vllm_env")
    if isinstance(variables, Mapping):
        identity.environment |= chosen(variables)
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
