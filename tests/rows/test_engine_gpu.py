# SPDX-License-Identifier: Apache-2.0
"""The engine with real b12x kernels on both model runners: every row's mode, from the outputs, is the scheduler's truth.

A4 on and off under VLLM_GPU_SYNC_CHECK=error, and with CUDA graphs. Needs what tests/gpu/engine-tests sets up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rows import gpu_runs

OWN, OTHER = 0.08, 0.08
"""Rows are nearer than OWN to the pure result of their mode and farther than OTHER from the other mode's."""

ENGINES = [name for name in gpu_runs.RUNS if name != gpu_runs.LAYER]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_runs.folder_of(ENGINES, True, tmp_path_factory.mktemp)


def way(folder: Path, name: str, way: str = "graphs") -> dict[str, Any]:
    result: dict[str, Any] = gpu_runs.findings(folder, name)[way]
    assert "error" not in result, result["error"]
    assert result["runner"] == name[:2]
    assert result["finite"]
    assert result["prefill_rows"] > 200
    assert result["kinds"]["mixed step"] > 0
    return result


def check_modes(result: dict[str, Any]) -> None:
    assert result["classes"] == ["DualPlanExperts"]
    assert result["wrong_rows"] == 0, result["first_wrong"]
    calls = result["eager_calls"] + result["replayed_calls"]
    assert calls == result["layers"] * result["steps"]
    assert result["own"] < OWN
    assert result["other"] > OTHER


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_modes_without_a_device_read(folder: Path, runner: str) -> None:
    result = way(folder, f"{runner}-eager", "armed")
    assert result["sync_checked"]
    check_modes(result)
    assert result["replayed_calls"] == 0
    assert result["a4_rows"] == result["layers"] * result["prefill_rows"]
    assert result["counters"]["a4_rows"] == result["prefill_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_off_keeps_upstreams_class(folder: Path, runner: str) -> None:
    result = way(folder, f"{runner}-eager", "off")
    assert result["sync_checked"]
    assert result["classes"] == ["B12xExperts"]
    assert not result["row_typer"]
    assert not any(result["counters"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("name", ["graphs", "piecewise"])
def test_graphs_run_every_row_w4a16(folder: Path, runner: str, name: str) -> None:
    result = way(folder, f"{runner}-{name}")
    check_modes(result)
    assert result["eager_calls"] == 0
    assert result["w4a16_bit_equal_rows"] == result["w4a16_rows"] > 0
    assert result["counters"]["graph_rows"] == result["prefill_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("name", ["switch", "decode-graphs", "keep-packed"])
def test_prefill_steps_beside_graphs(folder: Path, runner: str, name: str) -> None:
    """Steps with prefill rows run eagerly and A4, decode steps replay."""
    result = way(folder, f"{runner}-{name}")
    check_modes(result)
    assert result["replayed_calls"] > 0
    assert result["replayed_prefill_rows"] == 0
    assert result["a4_rows"] == result["layers"] * result["prefill_rows"]
    assert result["counters"]["graph_rows"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_packed_weights_side_by_side(folder: Path, runner: str) -> None:
    """Every layer holds both, and the modes are as without the switch. That W4A16 rows then equal an unarmed layer's bit
    for bit is tests/rows/test_calls.py's."""
    result = way(folder, f"{runner}-keep-packed", "armed")
    check_modes(result)
    assert result["packed"] == result["layers"]
    assert result["a4_rows"] == result["layers"] * result["prefill_rows"]
    assert way(folder, f"{runner}-eager", "armed")["packed"] == 0
