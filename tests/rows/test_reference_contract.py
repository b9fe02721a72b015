# SPDX-License-Identifier: Apache-2.0
"""The reference b12x and the two real libraries give the same answers, so that the reference cannot drift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.child import run_child

from rows import contract_cases


@pytest.fixture(scope="module", params=["b12x-flashinfer", "b12x-pypi"])
def real(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_child("rows.contract_cases:real", provider=request.param, with_numerics=True)


@pytest.fixture
def ours(reference: Any) -> dict[str, Any]:
    return contract_cases.answers(reference)


@pytest.mark.parametrize("topic", ["plans", "regimes", "preparation", "refusals", "proof"])
def test_same_answers(real: dict[str, Any], ours: dict[str, Any], topic: str) -> None:
    assert ours[topic] == real[topic]


def test_abilities_are_found(real: dict[str, Any]) -> None:
    found = real["provider"]
    assert found["kind"] == "dual", found
    assert found["missing"] == ""
    assert found["name"].split()[0] in ("flashinfer-python", "b12x")


def test_zero_copy(real: dict[str, Any]) -> None:
    assert all(real["preparation"].values()), real["preparation"]


def test_nvfp4_numerics(real: dict[str, Any], reference: Any) -> None:
    """b12x's host reference computes in fp32 and rounds the intermediate elsewhere; both are far closer to each other
    than A4 is to W4A16."""
    case, given = contract_cases.numerics_case(), contract_cases.sources()
    experts = contract_cases.prepare(reference, ("nvfp4", "w4a16"), given)
    outputs = {}
    for mode in ("nvfp4", "w4a16"):
        plan = reference.plan(contract_cases.caps(reference, experts.plan, mode, 8))
        scratch = torch.zeros(plan.scratch_specs()[0].shape[0], dtype=torch.uint8)
        output = torch.empty_like(case.x)
        binding = reference.bind(
            plan, scratch=scratch, a=case.x, experts=experts, topk_weights=case.weights, topk_ids=case.ids,
            output=output,
        )  # fmt: skip
        outputs[mode] = reference.run(binding=binding).float()
    library = torch.tensor(real["numerics"])
    error = (outputs["nvfp4"] - library).norm() / library.norm()
    distance = (outputs["w4a16"] - library).norm() / library.norm()
    assert error < 0.02 < 0.1 < distance, (error, distance)
