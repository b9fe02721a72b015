# SPDX-License-Identifier: Apache-2.0
"""After the warm-up nothing is compiled: not by any slice size, mode, layer kind or the draft model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rows import harness, warming
from rows.warming import model_of

MAX_ROWS = 300
SIZES = (1, 2, 4, 8, 16, 256, MAX_ROWS)


def warm_up(monkeypatch: pytest.MonkeyPatch, target: Any, draft: Any = None) -> None:
    """vLLM's own b12x warm-up of a worker with these models."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)
    warming.warm_up(target, draft, max_rows=MAX_ROWS, sizes=SIZES)


def sweep(layer: Any, geometry: harness.Geometry, reference: Any, sizes: Any) -> set[Any]:
    """What calls of all *sizes*, alone and beside a decode row, would still compile."""
    before = set(reference.compiled)
    armed = type(harness.experts_of(layer)).__name__ == "DualPlanExperts"
    for rows in sizes:
        batch = harness.make_batch(rows, geometry)
        for prefill in ([], [(0, rows)], [(1, rows)]) if armed else ([],):
            with harness.step(rows, [r for r in prefill if r[0] < r[1]]):
                harness.call(layer, batch)
    return set(reference.compiled) - before


@pytest.mark.parametrize("keep_packed", [None, "1"])
def test_sweep_compiles_nothing(
    switches: Callable[..., None],
    reference: Any,
    monkeypatch: pytest.MonkeyPatch,
    keep_packed: str | None,
) -> None:
    geometry = harness.Geometry(E=4, H=128, I=64, topk=2)
    switches(arm="1", force_a16="1", keep_packed=keep_packed)
    layer = harness.load_layer(geometry)
    # Small sizes one by one, the others around every capacity's ends.
    sizes = sorted(
        {
            *range(1, 41),
            *(edge + d for edge in (48, 56, 64, 96, 128, 192, 256) for d in (0, 1)),
            MAX_ROWS,
        }
    )
    warm_up(monkeypatch, model_of(layer))
    assert {launch.a4 for launch in reference.launches} == {True, False}
    assert sweep(layer, geometry, reference, sizes) == set()


def test_armed_and_unarmed_layers_of_one_geometry(
    switches: Callable[..., None], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share every number in upstream's key; warming up one must not pass for the other. The unarmed one may be
    the draft model's, which upstream does not visit."""
    switches(arm="1", force_a16="1")
    armed = harness.load_layer()
    unarmed = harness.load_layer(algo="W4A16_NVFP4", calibrated=False)
    sizes = (*range(1, 30), 64, 65, 200, MAX_ROWS)
    for target, draft in ((model_of(armed, unarmed), None), (model_of(armed), model_of(unarmed))):
        reference.compiled.clear()
        warm_up(monkeypatch, target, draft)
        assert sweep(armed, harness.SMALL, reference, sizes) == set()
        assert sweep(unarmed, harness.SMALL, reference, sizes) == set()


def test_dual_plans_with_and_without_activation_scales(
    armed: None, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class and geometry, two kinds: a layer without scales (compressed, uncalibrated) must not stand for one that
    runs A4."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import dual_plan

    w4a16_only = harness.make_layer("W4A16_NVFP4", harness.SMALL)
    harness.fill(w4a16_only, 1, calibrated=False)
    dual_plan.set_dual_plan(w4a16_only, dual_plan.DualPlan("layer", None))
    w4a16_only.quant_method.process_weights_after_loading(w4a16_only)
    layer = harness.load_layer()
    warm_up(monkeypatch, model_of(w4a16_only, layer))
    for one in (w4a16_only, layer):
        assert sweep(one, harness.SMALL, reference, range(1, 20)) == set()


def test_off_keeps_upstreams_warm_up(
    switches: Callable[..., None], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.warmup import b12x_warmup

    switches(force_a16="1")
    target, draft = (harness.load_layer(algo=algo) for algo in ("NVFP4", "W4A16_NVFP4"))
    units = b12x_warmup._collect_warmup_units(model_of(target), (1, 2, 300), torch.bfloat16)
    b12x_warmup._compile_warmup_units(units)
    upstream = [launch.rows for launch in reference.launches]
    reference.launches.clear()
    monkeypatch.setattr(b12x_warmup, "b12x_warmup_token_counts", lambda **sizes: (1, 2, 300))
    warm_up(monkeypatch, model_of(target), model_of(draft))
    assert [launch.rows for launch in reference.launches] == upstream


def test_whatever_else_a_draft_model_warms_up_is_visited(
    armed: None, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model's units that are no NVFP4 MoE layers (a linear layer of b12x, say); shared ones come once."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import warmup
    from vllm.utils.b12x import B12xWarmupUnit

    target, draft = model_of(), model_of()
    keys = {target: ("shared", "target's"), draft: ("shared", "draft's")}

    def collect(model: Any, *_: Any) -> list[B12xWarmupUnit]:
        return [B12xWarmupUnit(name=k, key=k, compile=lambda: None) for k in keys[model]]

    worker = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    units = warmup.all_units(collect, worker, (1, 2), torch.bfloat16)
    assert [unit.key for unit in units] == ["shared", "target's", "draft's"]


def test_two_armed_layers_are_warmed_up_once(
    armed: None, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [harness.load_layer(seed=seed) for seed in range(2)]
    warm_up(monkeypatch, model_of(layers[0]))
    once = len(reference.launches)
    reference.launches.clear()
    warm_up(monkeypatch, model_of(*layers))
    assert len(reference.launches) == once


def test_a_capture_after_the_warm_up(
    armed: None, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that a capture needs are there; plans are, too."""
    from vllm.model_executor.layers.fused_moe import b12x

    layer = harness.load_layer()
    warm_up(monkeypatch, model_of(layer))
    monkeypatch.setattr(b12x, "_is_current_stream_capturing", lambda: True)
    reference.capturing = True
    for rows in (*SIZES, 3, 9, 57):
        with harness.step(None):
            harness.call(layer, harness.make_batch(rows))


@pytest.mark.parametrize(
    ("experts", "hidden", "n", "topk"),
    [(288, 4096, 1024, 8), (288, 4096, 256, 8), (512, 2560, 640, 10), (128, 2048, 768, 8)],
)
def test_real_libraries_decisions_between_the_ends(
    vllm_on_cpu: None, experts: int, hidden: int, n: int, topk: int
) -> None:
    """The bundled b12x compiles W4A16's fused kernel per tile choice, which it makes from the rows of the call. Within
    a capacity no row count chooses what neither end chooses, so both ends are warmed up and nothing else."""
    from b12x.moe import fused_moe
    from b12x.moe._shared.kernels.w4a16 import kernel as w4a16
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans, warmup

    weight_plan = fused_moe.plan_weights(
        quant_modes=("nvfp4", "w4a16"), source_format="modelopt_nvfp4", activation="silu",
        params_dtype=torch.bfloat16, num_experts=experts, hidden_size=hidden, intermediate_size=n, w13_layout="w13",
    )  # fmt: skip

    def tiles(rows: int, block: int) -> Any:
        common = {
            "moe_block_size": block, "sms": 188, "max_shared_mem": 101376, "scale_format": "e4m3_k16",
            "weight_layout": "modelopt", "weight_bits": 4, "allow_logical_tail": False, "small_m_occupancy": None,
        }  # fmt: skip
        return (
            w4a16._select_tile_config(
                problem_m=rows, problem_n=2 * n, problem_k=hidden, top_k=topk, **common
            ),
            w4a16._select_tile_config(
                problem_m=rows * topk, problem_n=hidden, problem_k=n, top_k=1, **common
            ),
        )

    def make_plan(mode: str, capacity: int) -> Any:
        return plans.make_execution_plan(
            fused_moe, weight_plan=weight_plan, quant_mode=mode, capacity=capacity, topk=topk,
            device=torch.device("cpu"), swiglu=(None, None, None), share_input=True,
        )  # fmt: skip

    made = plans.PlanSet(
        make_plan,
        ("w4a16", "nvfp4"),
        lambda plan: int(plan.scratch_specs()[0].shape[0]),
        8192,
        lambda: False,
    )

    def choice(rows: int) -> Any:
        plan = made.plan("w4a16", rows)
        if plan.caps.decode_config.w4a16_route_mode == "direct":
            return rows  # compiled per row count
        block = plan.launch_plan.execution.route_block_rows
        return block, tiles(rows, block)

    stand_in = SimpleNamespace(_sets=lambda topk: (made, made), _dual=SimpleNamespace(scales=()))
    launched = set(warmup.launch_sizes(stand_in, 8192, topk))
    for fewest, capacity in made.capacities(8192):
        limit = plans.rows_per_launch(made.plan("nvfp4", capacity))
        assert {(False, fewest), (False, min(capacity, 8192))} <= launched
        assert {(True, min(fewest, limit)), (True, min(capacity, 8192, limit))} <= launched
    warmed = {choice(rows) for a4, rows in warmup.launch_sizes(stand_in, 8192, topk) if not a4}
    for rows in (*range(1, 600), *range(600, 8192, 37), 8192):
        assert choice(rows) in warmed, rows
    large = made.plan("nvfp4", 8192).caps.decode_config
    assert large.nvfp4_share_input
    assert large.nvfp4_materialize_intermediate == (large.dynamic_tile_m == 128 and n % 128 == 0)
    assert not made.plan("nvfp4", 4).caps.decode_config.nvfp4_share_input, (
        "micro has no such switch"
    )
