# SPDX-License-Identifier: Apache-2.0
"""Row types on a GPU, both model runners: no device read, and what CUDA graphs and the eager switch do to them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import TESTS


def _reason_not_to_run() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    spec = importlib.util.find_spec("vllm")
    roots = spec.submodule_search_locations if spec is not None else None
    if not roots or not (Path(roots[0]) / "_C_stable_libtorch.py").exists():
        return "vLLM has no stand-in files: use tests/gpu/engine-tests"
    return ""


@pytest.fixture(autouse=True)
def gpu() -> None:
    reason = _reason_not_to_run()
    if reason:
        pytest.skip(reason)


def run(tmp_path: Path, **spec: Any) -> dict[str, Any]:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    process = subprocess.run(
        [sys.executable, "-m", "rows.gpu_cases", str(path)],
        cwd=TESTS, env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert result["runner"] == spec["runner"]
    assert result["scheduled_prefill_rows"] > 200
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("eager_switch", [False, True], ids=["graphs", "eager switch"])
def test_graphs_and_no_device_read(tmp_path: Path, runner: str, eager_switch: bool) -> None:
    """A scheduled prefill row is either typed in an eager call or counted as replayed; with the switch on all are typed.

    A device read while a step's row types are made would end the engine.
    """
    result = run(tmp_path, runner=runner, eager_switch=eager_switch)
    eager_rows = result["prefill_rows"] / 2  # the model has two MoE layers
    assert eager_rows + result["graph_rows"] == result["scheduled_prefill_rows"]
    assert (result["graph_rows"] == 0) is eager_switch
