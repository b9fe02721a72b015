# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: on a CPU in Triton's interpreter, on a GPU compiled. `kernel_checks` says what they must do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from csf.kernel_checks import CHECKS
from support.paths import SCRIPTS, TESTS


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=f"{SCRIPTS}{os.pathsep}{TESTS}")
    process = subprocess.run(
        [sys.executable, "-m", "csf.kernel_checks"],
        capture_output=True,
        text=True,
        env=env,
        cwd=TESTS,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results: dict[str, str | None] = json.loads(process.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, interpreted: dict[str, str | None]) -> None:
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_compiled(name: str) -> None:
    CHECKS[name]("cuda")
    torch.cuda.synchronize()
