# SPDX-License-Identifier: Apache-2.0
"""One MoE call: which launches it becomes, and when it stays one W4A16 launch. Behaviours, not ways."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.moe_layer import Geometry

from rows import harness


def launches(reference: Any) -> list[tuple[int, bool]]:
    return [(launch.rows, launch.a4) for launch in reference.launches]


def run(
    layer: Any, reference: Any, rows: int, *prefill: tuple[int, int], typed: int | None = -1
) -> list[Any]:
    """The launches of a call with *rows* rows under row types for *typed* rows (default: the same)."""
    reference.launches.clear()
    with harness.step(rows if typed == -1 else typed, prefill):
        harness.call(layer, harness.make_batch(rows))
    return launches(reference)


@pytest.fixture
def layer(armed: None, reference: Any) -> Any:
    return harness.load_layer()


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch, vllm_on_cpu: None) -> None:
    """Parts are launched as slices although there are more than the product's limit."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import parts

    monkeypatch.setattr(parts, "MAX_SLICED_PARTS", 8)


def test_call_shapes(layer: Any, reference: Any) -> None:
    assert run(layer, reference, 64, (8, 64)) == [(8, False), (56, True)]
    assert run(layer, reference, 2312, (8, 2312)) == [(8, False), (2304, True)]
    assert run(layer, reference, 300, (0, 300)) == [(300, True)]
    assert run(layer, reference, 12) == [(12, False)]
    assert run(layer, reference, 12, (2, 3)) == [(11, False), (1, True)]


def test_more_slices(layer: Any, reference: Any, sliced: None) -> None:
    assert run(layer, reference, 12, (2, 3)) == [(2, False), (1, True), (9, False)]


def test_small_prefill_counts_as_much_as_a_large_one(layer: Any, reference: Any) -> None:
    """No token threshold, no query length of 4: one prompt row among decodes runs A4."""
    assert run(layer, reference, 8, (7, 8)) == [(7, False), (1, True)]


def test_one_launch_w4a16(layer: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import b12x

    assert run(layer, reference, 12, typed=None) == [(12, False)], "no row types"
    assert run(layer, reference, 12, (0, 6), typed=24) == [(12, False)], "row types of other rows"
    reference.launches.clear()
    harness.call(layer, harness.make_batch(12))
    assert launches(reference) == [(12, False)], "no forward context"
    monkeypatch.setattr(b12x, "_is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(layer, reference, 12, (0, 6)) == [(12, False)], "capture"


@pytest.mark.parametrize("case", ["off", "weight only", "uncalibrated"])
def test_unarmed_layers_are_upstreams(
    switches: Callable[..., None], reference: Any, case: str
) -> None:
    """Same class, same plan requests, same bind arguments, bit-equal results as with the variable unset."""
    algo = "W4A16_NVFP4" if case == "weight only" else "NVFP4"
    results, seen = [], []
    for arm in (None, "0" if case == "off" else "1"):
        switches(arm=arm, force_a16="1")
        layer = harness.load_layer(algo=algo, calibrated=case == "off")
        bound: list[Any] = []
        real = reference.bind
        reference.bind = lambda plan, bound=bound, real=real, **call: (
            bound.append((plan.caps, sorted(call))) or real(plan, **call)
        )
        with harness.step(20, [(4, 20)]):
            results.append(harness.call(layer, harness.make_batch(20)))
        reference.bind = real
        seen.append((type(harness.experts_of(layer)).__name__, bound))
    assert results[0].equal(results[1])
    assert seen[0] == seen[1]
    assert seen[0][0] == "B12xExperts"


def test_armed_decode_is_one_launch_without_allocations(layer: Any, reference: Any) -> None:
    """The same bind arguments as upstream's, and no tensor is made that upstream does not make."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    from vllm.model_executor.layers.fused_moe import b12x

    stock = b12x.B12xExperts(layer.quant_method.moe, layer.quant_method.moe_quant_config)
    stock._prepared_experts = harness.experts_of(layer)._prepared_experts
    batch = harness.make_batch(6)
    calls: dict[str, Any] = {}
    for name, experts in (("stock", stock), ("ours", harness.experts_of(layer))):
        workspace = torch.empty(1 << 20, dtype=torch.bfloat16)
        arguments: dict[str, Any] = {}

        def launch(arguments: dict[str, Any] = arguments, **call: Any) -> None:
            assert not arguments, "a second launch"
            arguments.update(call)

        original, b12x._run_b12x_moe_plan = b12x._run_b12x_moe_plan, launch
        try:
            with harness.step(6, ()):
                experts.workspace_shapes(6, 128, 128, 2, 4, 4, None, layer.activation)
                with Operators() as operators:
                    experts.apply(
                        torch.empty_like(batch.x), batch.x, None, None, batch.weights, batch.ids, layer.activation, 4,
                        None, None, None, None, workspace, None, False,
                    )  # fmt: skip
        finally:
            b12x._run_b12x_moe_plan = original
        calls[name] = (sorted(arguments), operators.names)
    assert calls["ours"] == calls["stock"]


def test_slices_of_the_callers_tensors(layer: Any, reference: Any) -> None:
    """Parts bind slices, not copies, where addresses allow it."""
    seen = []
    real = reference.bind
    reference.bind = lambda plan, **call: seen.append(call) or real(plan, **call)
    batch = harness.make_batch(32)
    with harness.step(32, [(8, 32)]):
        harness.call(layer, batch)
    first, second = seen
    for name, tensor in (("a", batch.x), ("topk_ids", batch.ids), ("topk_weights", batch.weights)):
        assert first[name].data_ptr() == tensor.data_ptr()
        assert second[name].data_ptr() == tensor[8].data_ptr()
    assert second["output"].data_ptr() - first["output"].data_ptr() == 8 * 128 * 2
    assert first["scratch"].data_ptr() == second["scratch"].data_ptr()


def test_small_parts_off_a_16_byte_address(armed: None, reference: Any, sliced: None) -> None:
    """Top-k 3: row 5 starts at byte 60. The small-token kernels get aligned copies, larger parts the slices."""
    geometry = Geometry(E=4, H=128, I=64, topk=3)
    layer = harness.load_layer(geometry)
    batch = harness.make_batch(40, geometry)
    seen = []
    real = reference.bind
    reference.bind = lambda plan, **call: (
        seen.append((plan.caps.regime, call)) or real(plan, **call)
    )
    with harness.step(40, [(5, 12), (17, 40)]):
        harness.call(layer, batch)
    regimes = [regime.backend for regime, _ in seen]
    assert regimes == ["w4a16", "micro", "w4a16", "dynamic"]
    assert all(call["topk_ids"].data_ptr() % 16 == 0 for _, call in seen[:3])
    assert seen[3][1]["topk_ids"].data_ptr() == batch.ids[17].data_ptr()


def test_many_parts_become_two_launches(layer: Any, reference: Any) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4.parts import MAX_SLICED_PARTS

    few = [(2 * i, 2 * i + 1) for i in range(MAX_SLICED_PARTS // 2)]
    assert len(run(layer, reference, 2 * len(few), *few)) == MAX_SLICED_PARTS
    many = [(2 * i, 2 * i + 1) for i in range(MAX_SLICED_PARTS)]
    assert run(layer, reference, 40, *many) == [(40 - len(many), False), (len(many), True)]


def test_parts_beyond_the_rows_of_one_launch(
    layer: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dynamic NVFP4 kernel has a limit of its own: a longer part becomes several launches, with equal results."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import experts

    whole = _result(layer, 30, (4, 30))
    monkeypatch.setattr(experts, "rows_per_launch", lambda plan: 10)
    assert run(layer, reference, 30, (4, 30)) == [(4, False), (10, True), (10, True), (6, True)]
    assert _result(layer, 30, (4, 30)).equal(whole)


def test_clamped_activation(armed: None, reference: Any) -> None:
    """``swiglu_limit`` reaches both modes' plans."""
    plain = harness.load_layer()
    clamped = harness.load_layer(swiglu_limit=0.05)
    for prefill in ((), ((0, 30),)):
        assert not _result(plain, 30, *prefill).equal(_result(clamped, 30, *prefill))
    whole = [_result(clamped, 30), _result(clamped, 30, (0, 30))]
    assert _result(clamped, 30, (7, 30)).equal(torch.cat((whole[0][:7], whole[1][7:])))


def _result(layer: Any, rows: int, *prefill: tuple[int, int]) -> torch.Tensor:
    with harness.step(rows, prefill):
        return harness.call(layer, harness.make_batch(rows))


def test_kept_packed_weights_serve_the_w4a16_rows(
    switches: Callable[..., None], reference: Any
) -> None:
    switches(force_a16="1")
    unarmed = harness.load_layer(subnormal=True)
    switches(arm="1", force_a16="1")
    native = harness.load_layer(subnormal=True)
    switches(arm="1", force_a16="1", keep_packed="1")
    both = harness.load_layer(subnormal=True)
    batch = harness.make_batch(30)

    def result(layer: Any, *prefill: tuple[int, int]) -> torch.Tensor:
        with harness.step(30, prefill):
            return harness.call(layer, batch)

    assert not result(unarmed).equal(result(native)), "packed and native must differ here"
    mixed = result(both, (10, 30))
    assert mixed[:10].equal(result(unarmed)[:10]), "decode rows as on a server without A4"
    assert mixed[10:].equal(result(native, (0, 30))[10:])


def test_hooks_once_per_call(layer: Any, reference: Any, sliced: None) -> None:
    """Before the first and after the last launch, whatever the parts, and after a launch that raised."""
    import dataclasses

    events: list[Any] = []

    class Hooks:
        def before(self, topk_ids: torch.Tensor, split: Any) -> None:
            events.append(("before", tuple(topk_ids.shape), split is None))

        def after(self, split: Any) -> None:
            events.append(("after", split is None))

    experts = harness.experts_of(layer)
    experts._dual = dataclasses.replace(experts._dual, hooks=Hooks())
    real = reference.run
    reference.run = lambda **call: events.append("launch") or real(**call)
    run(layer, reference, 20, (3, 9), (12, 20))
    assert events == [("before", (20, 2), False), *["launch"] * 4, ("after", False)]
    events.clear()
    run(layer, reference, 5)
    assert events == [("before", (5, 2), True), "launch", ("after", True)]
    events.clear()

    def fail(**call: Any) -> None:
        raise RuntimeError("launch failed")

    reference.run = fail
    with pytest.raises(RuntimeError, match="launch failed"):
        run(layer, reference, 5)
    assert events[-1] == ("after", True)


def test_external_block_scales(switches: Callable[..., None], reference: Any) -> None:
    """The seam for compressed scales: a dual plan without activation scales over scratch that is filled per call."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import dual_plan

    switches(arm="1", force_a16="1")
    expected = harness.load_layer()
    switches(force_a16="1")
    layer = harness.make_layer("NVFP4", harness.SMALL)
    harness.fill(layer)
    holder: dict[str, Any] = {}

    class Fill:
        def before(self, topk_ids: torch.Tensor, split: Any) -> None:
            for name, scale in holder["scales"].items():
                getattr(layer, name).data.view(torch.uint8).copy_(scale)

        def after(self, split: Any) -> None:
            for name in holder["scales"]:
                getattr(layer, name).data.view(torch.uint8).fill_(
                    0x7F
                )  # NaN: the next layer's, or nobody's

    plan = dual_plan.DualPlan("layer", None, external_block_scales=True, hooks=Fill())
    dual_plan.set_dual_plan(layer, plan)
    layer.quant_method.process_weights_after_loading(layer)
    holder["scales"] = {
        name: getattr(layer, name).data.view(torch.uint8).clone()
        for name in ("w13_weight_scale", "w2_weight_scale")
    }
    plan.hooks.after(None)
    batch = harness.make_batch(9)
    with harness.step(9, [(2, 6)]):
        result = harness.call(layer, batch)
    assert type(harness.experts_of(layer)).__name__ == "DualPlanExperts"
    with harness.step(None):
        assert result.equal(harness.call(expected, batch)), (
            "no activation scales: every row W4A16, native"
        )
    with pytest.raises(ValueError, match="external block scales"):
        dual_plan.DualPlan("layer", None, external_block_scales=True, keep_packed=True)


def test_first_a4_call_is_logged_once_and_rows_are_counted(
    layer: Any, reference: Any, a4_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters, experts

    fresh = counters.StepCounters()
    monkeypatch.setattr(experts.counters, "count_a4_step", fresh.count_a4_step)
    second = harness.load_layer(seed=1)
    a4_log.clear()
    batch = harness.make_batch(20)
    for prefill in ([(4, 20)], [(0, 3), (5, 6)]):
        with harness.step(20, prefill):  # two layers, one step: counted once
            harness.call(layer, batch)
            harness.call(second, batch)
    with harness.step(20, []):
        harness.call(layer, batch)
    (record,) = a4_log
    assert "First A4 prefill call" in record.getMessage()
    assert "16 of 20 rows" in record.getMessage()
    from vllm.v1.worker.moe_row_types import MoERowTypes

    fresh.count_graph_step(MoERowTypes(24, ((0, 3), (5, 7))))
    fresh.count_graph_step(None)
    assert fresh.snapshot() == {"a4_rows": 20, "a4_steps": 2, "graph_rows": 5, "graph_steps": 1}
    monkeypatch.setattr(counters, "LOG_INTERVAL_S", 0.0)
    fresh._next_log = 0.0
    fresh.count_graph_step(MoERowTypes(24, ((0, 1),)))
    assert (
        "20 prefill rows with NVFP4 activations (2 steps); 6 prefill rows W4A16"
        in a4_log[-1].getMessage()
    )
    from prometheus_client import generate_latest

    text = generate_latest().decode()
    assert "vllm:b12x_a4_prefill_rows_total" in text
    assert "vllm:b12x_a4_graph_rows_total" in text


def test_warm_up_is_not_counted(
    layer: Any, a4_log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM warms up with made-up prompts that run through the model like real ones."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters, experts
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.moe_row_types import MoERowTypes, uncounted

    fresh = counters.StepCounters()
    monkeypatch.setattr(counters, "COUNTERS", fresh)
    monkeypatch.setattr(experts.counters, "count_a4_step", fresh.count_a4_step)
    a4_log.clear()
    batch = harness.make_batch(20)

    def step() -> None:
        with harness.step(20, [(4, 20)]):
            harness.call(layer, batch)
        fresh.count_graph_step(MoERowTypes(24, ((0, 3),)))

    @uncounted
    def warm_up(fails: bool) -> int:
        step()
        if fails:
            raise RuntimeError("no memory")
        return 7

    assert warm_up(False) == 7
    with pytest.raises(RuntimeError, match="no memory"):
        warm_up(True)
    assert not any(fresh.snapshot().values())
    assert not a4_log
    step()
    assert (fresh.a4_rows, fresh.graph_rows) == (16, 3)
    assert Worker.compile_or_warm_up_model.__code__ is uncounted(step).__code__


@pytest.mark.parametrize(
    ("tensor_rank", "stage", "shows"), [(0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_one_rank_of_all_shows_the_rows(
    vllm_on_cpu: None, monkeypatch: pytest.MonkeyPatch, tensor_rank: int, stage: int, shows: bool
) -> None:
    """Prometheus adds up the processes: a pipeline stage that counted the same rows again would double them."""
    from types import SimpleNamespace

    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters

    for name, rank in (("get_tp_group", tensor_rank), ("get_pp_group", stage)):
        group = SimpleNamespace(rank_in_group=rank)
        monkeypatch.setattr(parallel_state, name, lambda group=group: group)
    counters._is_first_rank.cache_clear()
    try:
        assert counters._is_first_rank() is shows
    finally:
        counters._is_first_rank.cache_clear()


def test_gate_first_weights_would_break_w4a16(reference: Any) -> None:
    """Why a dual plan is up-first: the first NVFP4 use of gate-first weights exchanges the halves under W4A16."""
    from rows import contract_cases as cases

    def w4a16(experts: Any, mode: str = "w4a16") -> torch.Tensor:
        plan = reference.plan(cases.caps(reference, experts.plan, mode, 8))
        case = cases.numerics_case()
        output = torch.empty_like(case.x)
        scratch = torch.zeros(plan.scratch_specs()[0].shape[0], dtype=torch.uint8)
        reference.run(
            binding=reference.bind(
                plan, scratch=scratch, a=case.x, experts=experts, topk_weights=case.weights, topk_ids=case.ids,
                output=output,
            )
        )  # fmt: skip
        return output

    for layout, broken in (("w13", False), ("w31", True)):
        plan = cases.plan_weights(reference, ("nvfp4", "w4a16"), layout)
        experts = reference.prepare_weights(
            plan=plan, params_dtype=torch.bfloat16, **cases.sources()
        )
        before = w4a16(experts)
        w4a16(experts, "nvfp4")
        assert w4a16(experts).equal(before) != broken
