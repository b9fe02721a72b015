# SPDX-License-Identifier: Apache-2.0
"""Ranks that decided differently do not start; they neither hang nor serve."""

from __future__ import annotations

import pytest
from support.child import run_child

ON = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1", "VLLM_B12X_MOE_FP4_FORCE_A16": "1"}
OFF = {"VLLM_B12X_MOE_FP4_FORCE_A16": "1"}

CASES = {
    "": {"environments": [ON, ON], "calibrated": [[True, False]] * 2},
    # Multi-node multiprocessing copies no variables: one node has the switch, the other has not.
    "switches": {"environments": [ON, OFF], "calibrated": [[True]] * 2},
    "armed layers": {"environments": [ON, ON], "calibrated": [[True, True], [True, False]]},
    "CSF switches": {
        "environments": [{**ON, "VLLM_B12X_CSF_SCALE_PREFETCH": "0"}, ON],
        "calibrated": [[True]] * 2,
    },
    "equal settings": {
        "environments": [{**ON, "VLLM_B12X_CSF_COMPRESS": "0", "VLLM_B12X_CSF_SCALE_PREFETCH": "1"}, ON],
        "calibrated": [[True]] * 2,
    },
    "stages": {"environments": [ON, ON], "calibrated": [[], [True, False]], "stages": True},
    "unarmed stages": {"environments": [ON, ON], "calibrated": [[False], []], "stages": True},
    "switches of stages": {"environments": [ON, OFF], "calibrated": [[True], []], "stages": True},
}  # fmt: skip
DIFFER = ("switches", "armed layers", "CSF switches")


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    return dict(
        zip(
            CASES,
            run_child("rows.agreement_cases:scenarios", cases=list(CASES.values())),
            strict=True,
        )
    )


def test_equal_ranks_start(errors: dict[str, list[str]]) -> None:
    assert errors[""] == errors["equal settings"] == ["a4", "a4"]


def test_pipeline_stages_dispatch_alike(errors: dict[str, list[str]]) -> None:
    """A stage without armed layers of its own leaves CUDA graphs where another stage does."""
    assert errors["stages"] == ["a4", "a4"]
    assert errors["unarmed stages"] == ["w4a16", "w4a16"]


def test_pipeline_stages_with_other_switches_do_not_start(errors: dict[str, list[str]]) -> None:
    first, second = errors["switches of stages"]
    assert first == second
    assert "RanksDisagreeError: pipeline stages 0 and 1 differ in switches:" in first


@pytest.mark.parametrize("topic", DIFFER)
def test_a_difference_stops_every_rank(errors: dict[str, list[str]], topic: str) -> None:
    first, second = errors[topic]
    assert first == second
    assert f"RanksDisagreeError: tensor-parallel ranks 0 and 1 differ in {topic}:" in first
    assert "\n" not in first


def test_every_topic_counts(vllm_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import agreement
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    base = agreement.describe("b12x 1", ["a", "b"], "on")
    digests = {
        agreement.digest(description)
        for description in (
            base,
            agreement.describe("b12x 2", ["a", "b"], "on"),
            agreement.describe("b12x 1", ["a", "c"], "on"),
            agreement.describe("b12x 1", ["a", "b"], "off"),
            {**base, "patch set": "another"},
        )
    }
    monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "1")
    settings.get_settings.cache_clear()
    digests.add(agreement.digest(agreement.describe("b12x 1", ["a", "b"], "on")))
    monkeypatch.undo()
    settings.get_settings.cache_clear()
    assert len(digests) == 6
