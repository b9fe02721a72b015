# SPDX-License-Identifier: Apache-2.0
"""The dual-plan experts on b12x's real kernels; needs a GPU and what tests/gpu/engine-tests sets up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.paths import TESTS

from rows.test_row_types_gpu import _reason_not_to_run

pytestmark = pytest.mark.gpu


def run(case: str) -> dict[str, Any]:
    reason = _reason_not_to_run()
    if reason:
        pytest.skip(reason)
    process = subprocess.run(
        [sys.executable, "-m", "rows.dual_plan_gpu_cases", case], cwd=TESTS, env=dict(os.environ),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    print(result)
    return result


def test_rows_run_in_their_mode() -> None:
    """Which rows ran A4 is read from the outputs: the modes are 0.15 apart, the kernels' own errors are far smaller."""
    result = run("mixed_steps")
    assert result["steps"] > 50
    assert result["wrong_rows"] == 0
    assert result["errors"]["w4a16"] < 2e-2
    assert result["errors"]["nvfp4"] < 8e-2


def test_nothing_compiles_after_the_warm_up() -> None:
    result = run("nothing_compiles")
    assert result["warm_up_launches"] > 50
    assert result["calls"] > 200


def test_replay_equals_eager_after_a_reload() -> None:
    result = run("replay_after_reload")
    assert all(result.values()), result
