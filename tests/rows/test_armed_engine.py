# SPDX-License-Identifier: Apache-2.0
"""From the switch to the launches: the real engine, loader, scheduler and runner, with layers that the load armed."""

from __future__ import annotations

from typing import Any

import pytest
from support.child import run_child

ON = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1", "VLLM_B12X_MOE_FP4_FORCE_A16": "1"}
PROMPTS, TOKENS = [3, 40, 20], 4


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    return run_child("rows.armed_engine:serve", env=ON, prompts=PROMPTS, max_tokens=TOKENS)


def test_layers_are_armed_and_said_so(served: dict[str, Any]) -> None:
    assert set(served["classes"]) == {"DualPlanExperts"}
    assert "A4 prefill: 2 of 2 MoE layers armed. b12x is flashinfer-python" in served["log"]
    assert served["log"].count("First A4 prefill call") == 1


def test_every_layer_sees_the_same_split(served: dict[str, Any]) -> None:
    for step in served["steps"]:
        assert len(step) == 2
        assert step[0] == step[1]


def test_prompt_rows_run_a4_and_others_w4a16(served: dict[str, Any]) -> None:
    launches = [launch for step in served["steps"] for launch in step[0]]
    rows = {
        mode: sum(count for name, count in launches if name == mode) for mode in ("nvfp4", "w4a16")
    }
    assert rows == {"nvfp4": sum(PROMPTS), "w4a16": len(PROMPTS) * (TOKENS - 1)}
    assert any(len(step[0]) > 1 for step in served["steps"]), (
        "no step mixed prefill and decode rows"
    )
    assert served["steps"][-1][0][0][0] == "w4a16"
