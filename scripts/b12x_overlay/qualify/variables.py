# SPDX-License-Identifier: Apache-2.0
"""Environment variables that change what is measured; no other variable of a server is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RECORDED = (
    "B12X_W4A16_A4_PREFILL_MIN_TOKENS",
    "VLLM_B12X_A4_KEEP_PACKED",
    "VLLM_B12X_A4_PREFILL_EAGER",
    "VLLM_B12X_CSF_COMPRESS",
    "VLLM_B12X_CSF_RAISE_MAIN_STREAM",
    "VLLM_B12X_CSF_SCALE_PREFETCH",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_USE_V2_MODEL_RUNNER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)

_PLAIN = re.compile(r"[\w.,:+-]{0,64}")


def chosen(given: Mapping[str, Any]) -> dict[str, str]:
    """The recorded ones among *given*."""
    return clean({name: str(given[name]) for name in RECORDED if given.get(name) is not None})


def clean(variables: Mapping[str, str]) -> dict[str, str]:
    """*variables* with values fit for a report: one that is no plain word becomes ``<set>``."""
    return {
        name: value if _PLAIN.fullmatch(value) else "<set>" for name, value in variables.items()
    }
