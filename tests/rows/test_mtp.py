# SPDX-License-Identifier: Apache-2.0
"""A model whose own MTP layer drafts for it: real speculator, loader, scheduler and V2 runner, with and without CSF."""

from __future__ import annotations

from typing import Any

import pytest
from support import cpu_engine
from support.child import run_child

ON = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1", "VLLM_B12X_MOE_FP4_FORCE_A16": "1"}
PROMPTS, DRAFTS, TOKENS = [3, 80], 2, 6


@pytest.fixture(scope="module", params=["plain", "eager-csf"])
def served(request: pytest.FixtureRequest) -> dict[str, Any]:
    csf = request.param == "eager-csf"
    more = {"VLLM_B12X_A4_PREFILL_EAGER": "1", "VLLM_B12X_CSF_COMPRESS": "1"} if csf else {}
    found: dict[str, Any] = run_child(
        "rows.mtp_engine:serve",
        env={**cpu_engine.V2, **ON, **more},
        prompts=PROMPTS, drafts=DRAFTS, max_tokens=TOKENS,
    )  # fmt: skip
    return {"csf": csf, **found}


def rows_of(served: dict[str, Any], model: str, mode: str) -> list[int]:
    """Rows of *model* in *mode*, by forward pass."""
    return [
        sum(rows for whose, ran, rows in one if (whose, ran) == (model, mode))
        for one in served["passes"]
    ]


def test_the_target_is_armed_and_its_drafter_is_not(served: dict[str, Any]) -> None:
    """The drafter's NVFP4 layer is calibrated like the target's."""
    assert served["classes"] == {"target": ["DualPlanExperts"], "draft": ["B12xExperts"]}
    assert "A4 prefill: 1 of 1 MoE layers armed" in served["log"]
    assert "A4 prefill: draft model: none of 1 MoE layers armed" in served["log"]
    assert "not armed: draft layer, whose forwards hold no prefill rows" in served["log"]


def test_prompt_rows_run_a4_and_verification_rows_w4a16(served: dict[str, Any]) -> None:
    assert sum(rows_of(served, "target", "nvfp4")) == sum(PROMPTS)
    both = list(
        zip(rows_of(served, "target", "nvfp4"), rows_of(served, "target", "w4a16"), strict=True)
    )
    assert all(w4a16 % (1 + DRAFTS) == 0 for _, w4a16 in both)
    assert any(a4 and w4a16 for a4, w4a16 in both), "no step mixed a prompt's chunk and drafts"
    assert any(w4a16 > 1 + DRAFTS for _, w4a16 in both), "no step verified for both requests"


def test_the_drafter_runs_w4a16_beside_the_targets_prefill_too(served: dict[str, Any]) -> None:
    assert not any(rows_of(served, "draft", "nvfp4"))
    assert max(rows_of(served, "draft", "w4a16")) == 32, "it reads whole chunks of prompts"


def test_draft_layers_are_not_compressed(served: dict[str, Any]) -> None:
    assert served["compressed"] == {"target": [served["csf"]], "draft": [False]}
