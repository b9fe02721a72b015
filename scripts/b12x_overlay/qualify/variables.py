# SPDX-License-Identifier: Apache-2.0
"""Environment variables that change what is measured; of no other variable a value is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from b12x_overlay.qualify.redact import redact

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

_DISTINCT = 8
"""Characters from which on a value is no common word, so that replacing it cannot garble a report."""

_PLAIN = re.compile(r"[\w.,:+-]{0,64}")


def chosen(given: Mapping[str, Any]) -> dict[str, str]:
    """The recorded ones among *given*."""
    return clean({name: str(given[name]) for name in RECORDED if given.get(name) is not None})


def clean(variables: Mapping[str, str]) -> dict[str, str]:
    """*variables* with values fit for a report.

    ``<set>`` replaces the value of a variable that is not `RECORDED`, since a key, a host or a user name may look like
    any other word, and one that is no plain word. The rest is redacted.
    """
    return {
        name: redact(value) if name in RECORDED and _PLAIN.fullmatch(value) else "<set>"
        for name, value in variables.items()
    }


def private(variables: Mapping[str, str]) -> list[str]:
    """The values that `clean` hides and that are long enough to be told from the words of a report."""
    shown = clean(variables)
    return [
        value
        for name, value in variables.items()
        if shown[name] != value and len(value) >= _DISTINCT
    ]
