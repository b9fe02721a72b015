# SPDX-License-Identifier: Apache-2.0
"""An armed layer on the real b12x kernels: modes decided from outputs, capture, reload, no device read, no late compile.

One child process runs everything (its compiles take most of the time) and the tests look at its findings; on SM90 the
kernels run through the test-only PTX rewrite (``gpu.sm90``). The b12x is the one on PYTHONPATH: run it with each.
"""

from __future__ import annotations

from typing import Any

import pytest

from rows import gpu_layer, gpu_runs

OWN, OTHER = 0.08, 0.1
"""A row is nearer than OWN to the float64 reference of its mode and farther than OTHER from the other's."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = gpu_runs.folder_of([gpu_runs.LAYER], False, tmp_path_factory.mktemp)
    return gpu_runs.findings(folder, gpu_runs.LAYER)


def check_step(step: dict[str, Any]) -> None:
    assert step["right"], "a row ran in the other mode"
    assert step["finite"]
    assert step["own"] < OWN
    assert step["other"] > OTHER
    assert step["w4a16_alone_equal"], "a W4A16 part differs from the same launch by itself"
    assert step["w4a16_same_regime_equal"], (
        "W4A16 rows differ from one W4A16 call on the same kernel"
    )
    assert step["w4a16_largest_difference"] < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("form", gpu_layer.FORMS)
@pytest.mark.parametrize("name", gpu_layer.STEPS)
def test_each_row_runs_in_its_mode(found: dict[str, Any], name: str, form: str) -> None:
    step = found["steps"][form][name]
    check_step(step)
    assert step["gathered"] is (form == "gathered")


@pytest.mark.gpu
def test_an_unarmed_layer_ignores_row_types(found: dict[str, Any]) -> None:
    assert found["class"] == "DualPlanExperts"
    assert found["unarmed"] == {"class": "B12xExperts", "equal": True}


@pytest.mark.gpu
def test_nothing_compiles_after_the_warm_up(found: dict[str, Any]) -> None:
    """Every size up to the largest step: all W4A16, all A4, mixed, many parts, and the unarmed layer."""
    assert found["warm-up"]["compiled"] + found["warm-up"]["from_disk"] > 10
    assert found["cold"] == []


@pytest.mark.gpu
def test_no_device_read(found: dict[str, Any]) -> None:
    assert found["no_device_read"] and all(found["no_device_read"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("moment", ["captured", "reloaded"])
def test_a_graph_runs_w4a16_and_follows_a_reload(found: dict[str, Any], moment: str) -> None:
    for rows, graph in found["graphs"].items():
        assert graph[moment]["w4a16_rows"] == int(rows)
        assert graph[moment]["own"] < OWN
        assert graph[moment]["equals_eager"]
        assert graph[moment]["mixed_right"], "eager steps beside the graph keep running A4"


def test_the_same_checks_on_the_reference_b12x() -> None:
    """So that the checks themselves, and their float64 references, are tested where there is no GPU."""
    from support.child import run_child

    found = run_child("rows.gpu_layer:findings", device="cpu")
    assert found["unarmed"] == {"class": "B12xExperts", "equal": True}
    steps = [step for form in found["steps"].values() for step in form.values()]
    for step in (*steps, found["step after reload"]):
        check_step(step)
    assert max(step["own"] for step in steps) < 1e-2
    assert sum(step["w4a16_same_regime_rows"] for step in steps) > 20
