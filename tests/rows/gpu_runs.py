# SPDX-License-Identifier: Apache-2.0
"""The GPU runs of A4 prefill, each a process of its own, side by side: imports and compiles take most of their time.

``python -m rows.gpu_runs FOLDER [NAME...]`` leaves NAME.json and NAME.log in FOLDER and prints one line per run; the tests
start what they need themselves, or look at the findings in $ROWS_GPU_FINDINGS.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.paths import TESTS

LAYER = "layer"
RUNS: dict[str, dict[str, Any] | None] = {LAYER: None}
"""Name to the spec of rows.gpu_engine; None is rows.gpu_layer."""
for _runner in ("V1", "V2"):
    RUNS[f"{_runner}-eager"] = {
        "runner": _runner, "sync_check": "error", "ways": {"off": {"arm": False}, "armed": {}},
    }  # fmt: skip
    RUNS[f"{_runner}-graphs"] = {
        "runner": _runner, "ways": {"graphs": {"cudagraph_mode": "FULL"}},
    }  # fmt: skip
    RUNS[f"{_runner}-switch"] = {
        "runner": _runner, "ways": {"graphs": {"cudagraph_mode": "FULL", "eager_switch": True}},
    }  # fmt: skip
    RUNS[f"{_runner}-decode-graphs"] = {
        "runner": _runner, "ways": {"graphs": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    }  # fmt: skip
    RUNS[f"{_runner}-piecewise"] = {
        "runner": _runner, "breakable": True, "ways": {"graphs": {"cudagraph_mode": "PIECEWISE"}},
    }  # fmt: skip
    RUNS[f"{_runner}-keep-packed"] = {
        "runner": _runner,
        "ways": {"armed": {"keep_packed": True}, "graphs": {"keep_packed": True, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    }  # fmt: skip


def reason_not_to_run(engine: bool) -> str:
    """Why this machine cannot run b12x's kernels (and, with *engine*, a vLLM engine), or ""."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    for name in ("vllm", "b12x", "cutlass"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: use tests/gpu/engine-tests"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    if not (root / "v1/worker/moe_row_types.py").exists():
        return "vLLM is not patched: run scripts/apply-patches"
    if engine and not (root / "_C_stable_libtorch.py").exists():
        return "vLLM has no stand-in files: use tests/gpu/engine-tests"
    return ""


def run(folder: Path, name: str, timeout: float = 400) -> str:
    """One run; returns what came of it in a line."""
    spec, out = RUNS[name], folder / f"{name}.json"
    command = [sys.executable, "-m", "rows.gpu_layer", str(out)]
    if spec is not None:
        path = folder / f"{name}.spec"
        model = folder / f"{name}-model"
        path.write_text(json.dumps({**spec, "folder": str(model)}), encoding="utf-8")
        command = [sys.executable, "-m", "rows.gpu_engine", str(out), str(path)]
    start = time.monotonic()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        try:
            code: Any = subprocess.run(
                command, cwd=TESTS, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout, check=False
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "killed after the time limit"
    return f"{name}: {code}, {time.monotonic() - start:.0f} s"


def run_all(folder: Path, names: list[str], timeout: float = 400) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(names)) as pool:
        for line in pool.map(lambda name: run(folder, name, timeout), names):
            print(line, flush=True)


def findings(folder: Path, name: str) -> Any:
    """What the run found.

    Raises:
        AssertionError: it ended before it could say; the message is the end of its log.
    """
    out = folder / f"{name}.json"
    log = folder / f"{name}.log"
    assert out.exists(), log.read_text(encoding="utf-8", errors="replace")[-6000:]
    return json.loads(out.read_text(encoding="utf-8"))


def folder_of(names: list[str], engine: bool, make_folder: Any) -> Path:
    """The folder with the findings of *names*, after running them if need be; skips where that is not possible."""
    import pytest

    given = os.environ.get("ROWS_GPU_FINDINGS")
    if given:
        return Path(given)
    reason = reason_not_to_run(engine)
    if reason:
        pytest.skip(reason)
    folder: Path = make_folder("runs")
    run_all(folder, names)
    return folder


if __name__ == "__main__":
    run_all(
        Path(sys.argv[1]), sys.argv[2:] or list(RUNS), float(os.environ.get("RUN_LIMIT", "400"))
    )
