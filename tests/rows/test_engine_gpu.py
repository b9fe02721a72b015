# SPDX-License-Identifier: Apache-2.0
"""The engine with real b12x kernels on both model runners: every row's mode, from the outputs, is the scheduler's truth.

A4 on and off under VLLM_GPU_SYNC_CHECK=error, and with CUDA graphs. Needs what tests/gpu/engine-tests sets up.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rows import gpu_child

OWN, OTHER = 0.08, 0.08
"""Rows are nearer than OWN to the pure result of their mode and farther than OTHER from the other mode's."""

EAGER = {"off": {"arm": False}, "armed": {}}
GRAPHS = {
    "graphs": {"cudagraph_mode": "FULL"},
    "graphs, eager switch": {"cudagraph_mode": "FULL", "eager_switch": True},
    "decode graphs": {"cudagraph_mode": "FULL_DECODE_ONLY"},
}
RUNS: dict[str, dict[str, Any]] = {
    f"{runner} {kind}": {"runner": runner, "ways": ways, "sync_check": sync_check}
    for runner in ("V1", "V2")
    for kind, ways, sync_check in (("eager", EAGER, "error"), ("graphs", GRAPHS, None))
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings of all four processes, which run side by side: most of their time goes to imports and compiles."""
    given = os.environ.get("ROWS_GPU_ENGINES")  # findings of an earlier run
    if given:
        return json.loads(Path(given).read_text(encoding="utf-8"))
    reason = gpu_child.reason_not_to_run(engine=True)
    if reason:
        pytest.skip(reason)

    def run(item: tuple[str, dict[str, Any]]) -> tuple[str, Any]:
        name, spec = item
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        return name, gpu_child.run("rows.gpu_engine", folder, {**spec, "folder": str(folder)})

    with ThreadPoolExecutor(len(RUNS)) as pool:
        return dict(pool.map(run, RUNS.items()))


def way(found: dict[str, Any], runner: str, kind: str, name: str) -> dict[str, Any]:
    result = found[f"{runner} {kind}"][name]
    assert "error" not in result, result["error"]
    assert result["runner"] == runner
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
def test_modes_without_a_device_read(found: dict[str, Any], runner: str) -> None:
    result = way(found, runner, "eager", "armed")
    assert result["sync_checked"]
    check_modes(result)
    assert result["replayed_calls"] == 0
    assert result["a4_rows"] == result["layers"] * result["prefill_rows"]
    assert result["counters"]["a4_rows"] == result["prefill_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_off_keeps_upstreams_class(found: dict[str, Any], runner: str) -> None:
    result = way(found, runner, "eager", "off")
    assert result["sync_checked"]
    assert result["classes"] == ["B12xExperts"]
    assert not result["row_typer"]
    assert not any(result["counters"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_graphs_run_every_row_w4a16(found: dict[str, Any], runner: str) -> None:
    result = way(found, runner, "graphs", "graphs")
    check_modes(result)
    assert result["eager_calls"] == 0
    assert result["a4_rows"] == 0
    assert result["counters"]["graph_rows"] == result["prefill_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("name", ["graphs, eager switch", "decode graphs"])
def test_prefill_steps_beside_graphs(found: dict[str, Any], runner: str, name: str) -> None:
    """Steps with prefill rows run eagerly and A4, decode steps replay."""
    result = way(found, runner, "graphs", name)
    check_modes(result)
    assert result["replayed_calls"] > 0
    assert result["replayed_prefill_rows"] == 0
    assert result["a4_rows"] == result["layers"] * result["prefill_rows"]
    assert result["counters"]["graph_rows"] == 0
