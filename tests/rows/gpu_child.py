# SPDX-License-Identifier: Apache-2.0
"""Run one module of the GPU tests in a process of its own, and say why one cannot run here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.paths import TESTS


def reason_not_to_run(engine: bool) -> str:
    """Why this machine cannot run b12x's kernels (and, with *engine*, a vLLM engine), or ""."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    missing = [
        name for name in ("vllm", "b12x", "cutlass") if importlib.util.find_spec(name) is None
    ]
    if missing:
        return f"{missing[0]} is not installed: use tests/gpu/engine-tests"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    if not (root / "v1/worker/moe_row_types.py").exists():
        return "vLLM is not patched: run scripts/apply-patches"
    if engine and not (root / "_C_stable_libtorch.py").exists():
        return "vLLM has no stand-in files: use tests/gpu/engine-tests"
    return ""


def run(
    module: str, tmp_path: Path, spec: dict[str, Any] | None = None, timeout: float = 400
) -> Any:
    """``python -m module OUT.json [SPEC.json]``; returns what it wrote to OUT.json."""
    out, arguments = tmp_path / "out.json", []
    if spec is not None:
        arguments = [str(tmp_path / "spec.json")]
        Path(arguments[0]).write_text(json.dumps(spec), encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "-m", module, str(out), *arguments],
        cwd=TESTS, env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-8000:]
    print(process.stderr[-4000:])  # pytest shows it with a failure
    return json.loads(out.read_text(encoding="utf-8"))
