# SPDX-License-Identifier: Apache-2.0
"""Abilities of the installed b12x: probed on the real libraries and on builds that have, or lack, something."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import reference_b12x

from rows import harness


@pytest.fixture
def provider(vllm_on_cpu: None) -> Any:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import provider

    return provider


def test_bind_with_a4_prefill_comes_first(provider: Any) -> None:
    assert provider.probe(reference_b12x.ReferenceB12x(a4_prefill=True)).kind == "bind"
    assert provider.probe(reference_b12x.ReferenceB12x()).kind == "dual"
    only_bind = provider.probe(reference_b12x.ReferenceB12x(a4_prefill=True, dual=False))
    assert only_bind.kind == "bind"
    assert "one quant mode at a time" in only_bind.no_dual


def test_what_is_missing_is_named(provider: Any) -> None:
    found = provider.probe(reference_b12x.ReferenceB12x(dual=False))
    assert found.kind is None
    assert "this build plans one quant mode at a time" in found.missing
    nothing = provider.probe(SimpleNamespace())
    assert nothing.kind is None
    assert "missing: Caps, plan, bind, run" in nothing.missing


def test_public_bind_proves_nothing(provider: Any) -> None:
    """Every b12x has ``bind(plan, **kwargs)``; only the real one's signature counts."""
    lying = reference_b12x.ReferenceB12x(dual=False)
    lying.bind = lambda plan, a4_prefill=None, **call: None
    assert provider.probe(lying).kind is None


@pytest.mark.parametrize("options", [{"dual": False}, {"a4_prefill": True}])
def test_layers_without_or_with_other_abilities(
    armed: None, reference: Any, a4_log: list[logging.LogRecord], options: dict[str, bool]
) -> None:
    other = reference_b12x.install(**options)
    layers = [_layer(number) for number in range(2)]
    harness.start(*layers)
    names = {type(harness.experts_of(layer)).__name__ for layer in layers}
    if options.get("a4_prefill"):
        assert names == {"DualPlanExperts"}
        assert not harness.warnings(a4_log)
    else:
        assert names == {"B12xExperts"}
        (warning,) = harness.warnings(a4_log)
        assert "TPMoEScratchPlan.bind(a4_prefill=)" in warning
    assert not other.launches


def _layer(number: int) -> Any:
    # The interface asks for hidden % 256.
    geometry = harness.Geometry(E=4, H=256, I=64)
    layer = harness.make_layer("NVFP4", geometry, prefix=f"model.layers.{number}.mlp.experts")
    harness.fill(layer, number)
    return layer


def test_a4_prefill_build_runs_both_modes(armed: None, reference: Any) -> None:
    """Over its packed weights, with the row ranges; the sources are released as upstream does."""
    other = reference_b12x.install(a4_prefill=True)
    layer = _layer(0)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.w13_weight.numel() == 0
    geometry = harness.Geometry(E=4, H=256, I=64)
    batch = harness.make_batch(20, geometry)

    def run(*prefill: tuple[int, int]) -> torch.Tensor:
        with harness.step(20, prefill):
            return harness.call(layer, batch)

    w4a16, a4 = run(), run((0, 20))
    assert not w4a16.equal(a4)
    other.launches.clear()
    mixed = run((3, 9), (12, 20))
    assert mixed.equal(torch.cat((w4a16[:3], a4[3:9], w4a16[9:12], a4[12:])))
    assert [(launch.quant_mode, launch.rows, launch.a4) for launch in other.launches] == [
        ("w4a16", 6, False),
        ("w4a16", 14, True),
    ]  # four parts are gathered into one of each mode


CASES = [
    # A4 on?, fork switch, kind, arming afterwards, fork switch afterwards, refused
    (True, None, "bind", "7", "1", False),
    (True, "1", "bind", "7", "1", False),
    (True, "0", "bind", "0", "0", True),
    (False, "1", "bind", "0", "0", False),
    (False, None, "bind", "0", "0", False),
    (True, None, "dual", "7", None, False),
    (True, "0", "dual", "7", "0", False),
    (False, "1", "dual", "7", "1", False),
]


@pytest.mark.parametrize(("enabled", "fork", "kind", "arm_after", "fork_after", "refused"), CASES)
def test_the_forks_switches_agree_with_ours(
    provider: Any,
    enabled: bool,
    fork: str | None,
    kind: str,
    arm_after: str,
    fork_after: str | None,
    refused: bool,
) -> None:
    environ = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "7"}
    if fork is not None:
        environ["B12X_W4A16_A4_PREFILL"] = fork
    refusal = provider.settle_fork_switches(
        enabled, environ, lambda: provider.Provider("a build", kind)
    )
    assert environ["B12X_W4A16_A4_PREFILL_MIN_TOKENS"] == arm_after
    assert environ.get("B12X_W4A16_A4_PREFILL") == fork_after
    assert (refusal is not None) == refused


def test_nothing_is_probed_without_a_switch(provider: Any) -> None:
    def never() -> Any:
        raise AssertionError("probing imports b12x's implementation, which takes seconds")

    assert provider.settle_fork_switches(False, {}, never) is None


def test_contradicting_switches_disarm(
    switches: Callable[..., None], reference: Any, a4_log: list[logging.LogRecord]
) -> None:
    switches(arm="1", force_a16="1", fork="0")
    reference_b12x.install(a4_prefill=True)
    layer = _layer(0)
    harness.start(layer)
    assert type(harness.experts_of(layer)).__name__ == "B12xExperts"
    assert "B12X_W4A16_A4_PREFILL=0 forbids it" in harness.warnings(a4_log)[0]
