# SPDX-License-Identifier: Apache-2.0
"""Every row's type in the MoE layer equals the truth from the scheduler, on both model runners of the real engine.

The comparison itself is in engine_cases.py, call by call, inside the child. Reading any tensor while row types are
computed raises there. Each run must have met the situations that it is for.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import cpu_engine
from support.child import ChildError, run_child

ARMED = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1536"}
EAGER = {"VLLM_B12X_A4_PREFILL_EAGER": "1"}
RUNNERS = {"V1": {}, "V2": cpu_engine.V2}

CHUNKS_AND_PREEMPTION = {
    "first chunk",
    "later chunk",
    "decode",
    "mixed step",
    "one-token tail",
    "resumed inside the prompt",
    "recomputed past the prompt",
    "chunk across the prompt's end",
}
PREFIX_HITS_AND_DRAFTS = {
    "first chunk",
    "later chunk",
    "mixed step",
    "verification",
    "one-token tail with placeholder drafts",
}


def run(case: str, runner: str, provider: str = "b12x-flashinfer", **env: str) -> dict[str, Any]:
    result: dict[str, Any] = run_child(
        f"rows.engine_cases:{case}", provider=provider, env={**ARMED, **RUNNERS[runner], **env}
    )
    assert result["runner"] == runner
    # No step went unseen: both MoE layers were called for every prefill row that was scheduled.
    assert result["prefill_rows"] == 2 * result["scheduled_prefill_rows"]
    return result


@pytest.mark.parametrize("runner", RUNNERS)
def test_chunks_preemption_and_resume(runner: str) -> None:
    result = run("chunks_and_preemption", runner)
    assert set(result["kinds"]) >= CHUNKS_AND_PREEMPTION
    assert result["calls"] > 150


@pytest.mark.parametrize("runner", RUNNERS)
def test_prefix_hits_and_speculation_with_the_eager_switch(runner: str) -> None:
    """With the switch on, exactly the steps with prefill rows are dispatched without CUDA graphs."""
    result = run("prefix_hits_and_drafts", runner, **EAGER)
    assert set(result["kinds"]) >= PREFIX_HITS_AND_DRAFTS


@pytest.mark.parametrize(("runner", "provider"), [("V1", "b12x-flashinfer"), ("V2", "b12x-pypi")])
def test_armed_layers_launch_a4_for_prefill_rows_only(runner: str, provider: str) -> None:
    """From checkpoint flags to launches: arming, real b12x plans, splitting; only the kernel itself is replaced."""
    result = run("modes_of_armed_layers", runner, provider, VLLM_B12X_MOE_FP4_FORCE_A16="1")
    assert result["armed"] == ["DualPlanExperts"] * 2
    assert set(result["kinds"]) >= {
        "mixed step",
        "decode",
        "later chunk",
        "resumed inside the prompt",
    }
    assert "2 of 2 MoE layers armed" in result["log"]


def test_off_none_armed_and_on() -> None:
    """Row types and eager dispatch need both the variable and an armed layer; warm-up and dummy runs carry none."""
    results = run_child("rows.engine_cases:row_typers", env=EAGER)
    for name in ("off", "none armed", "on"):
        result = results[name]
        assert result["typer"] is (name != "off")
        assert result["calls_at_start"] > 0
        assert result["with_row_types_at_start"] == 0
        assert result["calls"] > 0
        assert bool(result["with_row_types"]) is (name == "on")
        assert bool(result["eager_steps"]) is (name == "on")


def test_the_comparison_can_fail() -> None:
    """A rule that forgets the one-token tails is found out by the same run."""
    with pytest.raises(ChildError, match="AssertionError"):
        run("without_one_token_rule", "V1")
