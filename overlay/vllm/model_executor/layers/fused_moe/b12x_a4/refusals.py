# SPDX-License-Identifier: Apache-2.0
"""Configurations that A4 prefill does not run in, found at start and said by name."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.b12x_a4.settings import ARM
from vllm.v1.worker.moe_row_types import unsupported_reason


def configuration_without_row_types(config: Any) -> str:
    """Why the model runner cannot say which rows of an MoE call are prefill, or "".

    There the runner leaves the row types empty and every row would run W4A16, so layers are not armed and keep
    upstream's packed kernels.
    """
    if config is None:
        return ""
    return unsupported_reason(config) or ""


def refuse_weight_offloading(config: Any) -> None:
    """Stop the start when weights are to be offloaded.

    Offloaded parameters change their storage between forwards (prefetch) or live in host memory (UVA), while a dual
    plan's prepared experts and the captured graphs hold the addresses of the loaded ones.

    Raises:
        ValueError: naming both settings.
    """
    if config is None:
        return
    offload = getattr(config, "offload_config", None)
    if offload is None:
        return
    if offload.prefetch.offload_group_size > 0:
        flag = "--offload-group-size"
    elif offload.uva.cpu_offload_gb > 0:
        flag = "--cpu-offload-gb"
    else:
        return
    raise ValueError(
        f"A4 prefill ({ARM}) does not work with weight offloading ({flag}): unset one of the two."
    )
