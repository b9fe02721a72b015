# SPDX-License-Identifier: Apache-2.0
"""A function for ``run_child``: import one module of vLLM before any other."""

from __future__ import annotations

import importlib
import os

from support import cpu_ops


def import_first(module: str) -> dict[str, str]:
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    cpu_ops.install()
    return {"imported": importlib.import_module(module).__name__}
