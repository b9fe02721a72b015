# SPDX-License-Identifier: Apache-2.0
"""Input scales of NVFP4 MoE layers are zero until loaded, after a reload too; zero means absent.

The layer, its loader, the layerwise reload and b12x's preparation are the real ones. The allocator is poisoned: new
memory holds a number that looks like a calibrated scale, which is how the fault showed itself in use.
"""

from __future__ import annotations

from typing import Any

import pytest
from apply import input_scale_cases as cases
from support import sm120
from support.child import run_child

ALGOS = ("NVFP4", "W4A16_NVFP4")
E = 8
ZERO = {"w13_input_scale": [[0.0, 0.0]] * E, "w2_input_scale": [0.0] * E}
CALIBRATED: dict[str, list[int]] = {}  # no expert is absent


@pytest.fixture(scope="module", autouse=True)
def vllm_on_cpu() -> None:
    sm120.install()  # before the first import of vLLM, whichever test comes first


def close(values: list[float], wanted: list[float]) -> bool:
    return values == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("algo", ALGOS)
def test_new_layer_has_no_scales(algo: str) -> None:
    assert cases.created(algo) == ZERO


def test_weight_only_checkpoint_leaves_them_absent() -> None:
    result = cases.first_load("W4A16_NVFP4", None)
    assert result["loaded"] == ZERO
    assert result["error"] is None
    assert result["quant_mode"] == "w4a16"


def test_weight_only_reload_leaves_them_absent() -> None:
    result = cases.reloaded("W4A16_NVFP4", None)
    assert result["loaded"] == ZERO
    assert result["error"] is None
    assert result["same_storage"]


def test_loaded_values_override() -> None:
    result = cases.first_load("NVFP4", CALIBRATED, 0.01)
    assert close(
        [row[0] for row in result["loaded"]["w13_input_scale"]], [0.01 * (1 + e) for e in range(E)]
    )
    assert close(
        [row[1] for row in result["loaded"]["w13_input_scale"]], [0.01 * (1 + e) for e in range(E)]
    )
    assert close(result["loaded"]["w2_input_scale"], [0.01 * (1 + e) for e in range(E)])
    assert result["error"] is None
    assert close([float(v) for v in result["a2_gscale"]], [100 / (1 + e) for e in range(E)])


def test_reloaded_values_override() -> None:
    result = cases.reloaded("NVFP4", CALIBRATED, 0.02)
    assert close(result["loaded"]["w2_input_scale"], [0.02 * (1 + e) for e in range(E)])
    assert result["error"] is None
    assert result["same_storage"]


@pytest.mark.parametrize("algo", ALGOS)
def test_dummy_weights_are_unaffected(algo: str) -> None:
    scales = cases.dummy(algo)
    assert close(scales["w2_input_scale"], [1e-2] * E)
    assert close(scales["w13_input_scale"][3], [1e-2, 1e-2])


@pytest.mark.parametrize(
    ("absent", "name", "experts"),
    [
        ({"w2": [3, 5]}, "w2_input_scale", "2 of 8 experts: 3, 5."),
        ({"w1": [6], "w3": [6]}, "w13_input_scale", "1 of 8 experts: 6."),
        ({"w2": list(range(E))}, "w2_input_scale", "8 of 8 experts: 0, 1, 2, 3, 4, 5, 6, 7."),
    ],
)
def test_w4a4_with_absent_experts_is_refused(
    absent: dict[str, list[int]], name: str, experts: str
) -> None:
    error = cases.first_load("NVFP4", absent)["error"]
    assert error is not None
    assert "model.layers.0.mlp.experts" in error
    assert name in error
    assert experts in error
    assert "VLLM_B12X_MOE_FP4_FORCE_A16=1" in error


def test_w4a4_reload_with_absent_experts_is_refused() -> None:
    error = cases.reloaded("NVFP4", {"w2": [1]})["error"]
    assert error is not None
    assert "1 of 8 experts: 1." in error


def test_one_present_half_of_w13_is_a_scale() -> None:
    """The backends divide by the larger of the two halves, so one absent half gives no infinity."""
    result = cases.first_load("NVFP4", {"w1": [2]})
    assert result["loaded"]["w13_input_scale"][2][0] == 0.0
    assert result["error"] is None


def test_backend_that_shares_one_scale_needs_one(emulation: str = "emulation") -> None:
    assert cases.first_load("NVFP4", {"w2": [0]}, backend=emulation)["error"] is None
    error = cases.first_load("NVFP4", {"w2": list(range(E))}, backend=emulation)["error"]
    assert error is not None
    assert "w2_input_scale" in error


def test_weight_only_mode_of_a_calibrated_checkpoint_divides_by_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_B12X_MOE_FP4_FORCE_A16", "1")
    result = cases.first_load("NVFP4", {"w2": [3]})
    assert result["error"] is None
    assert result["quant_mode"] == "w4a16"


def stock(case: str, **arguments: Any) -> Any:
    return run_child(f"apply.input_scale_cases:{case}", tree="stock", **arguments)


def test_the_unpatched_tree_fails_all_of_this() -> None:
    """The proof that the tests above can fail: the same cases on vLLM as released."""
    result = stock("all_on_stock")
    stale = {"w13_input_scale": [[cases.STALE] * 2] * E, "w2_input_scale": [cases.STALE] * E}
    assert result["created"] == stale
    assert result["weight_only"]["loaded"] == stale
    assert result["weight_only_reload"]["loaded"] == stale
    assert result["absent"]["error"] is None
    assert result["absent_zero"]["a2_gscale"][3] == "inf"
