# SPDX-License-Identifier: Apache-2.0
"""DualPlanExperts with b12x's real kernels: ``python -m rows.dual_plan_gpu_cases CASE`` prints JSON.

tests/gpu/engine-tests makes the environment. On SM90 the kernels run through the test-only PTX rewrite.
"""

from __future__ import annotations

import json
import os
import random
import sys
from types import SimpleNamespace
from typing import Any

MAX_ROWS = 96


def start() -> None:
    os.environ.update(
        B12X_W4A16_A4_PREFILL_MIN_TOKENS="1",
        VLLM_B12X_MOE_FP4_FORCE_A16="1",
        VLLM_HAS_FLASHINFER_CUBIN="1",
    )
    import torch
    import vllm  # noqa: F401 - the stand-ins replace parts of it
    from gpu import sm90, vllm_stubs

    vllm_stubs.install()
    sm90.install()
    import vllm.distributed.parallel_state as parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    torch.cuda.set_device(0)
    init_workspace_manager(torch.device("cuda", 0))


def load(geometry: Any, seed: int = 0) -> Any:
    """A layer that was filled on the CPU and processed on the GPU."""
    from rows import harness

    layer = harness.make_layer("NVFP4", geometry)
    harness.fill(layer, seed)
    layer.to("cuda")
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def batch(rows: int, geometry: Any, seed: int) -> Any:
    from rows import harness

    made = harness.make_batch(rows, geometry, seed)
    return harness.Batch(made.x.cuda(), made.weights.cuda(), made.ids.cuda())


def expected(layer: Any, given: Any) -> dict[bool, Any]:
    """float32 ``[rows, H]`` by "a4": the reference b12x on copies of what the layer's kernels read."""
    import torch
    from support.reference_b12x import ReferenceB12x

    from rows import harness

    prepared = harness.experts_of(layer)._prepared_experts
    native = getattr(prepared.representation, "value", prepared.representation)
    reference = ReferenceB12x(fill_scratch=False)
    plan = reference.plan_weights(
        quant_modes=("nvfp4", "w4a16"), source_format="modelopt_nvfp4", activation="silu",
        params_dtype=torch.bfloat16, num_experts=prepared.num_experts, hidden_size=prepared.hidden_size,
        intermediate_size=prepared.intermediate_size, w13_layout="w13",
    )  # fmt: skip
    experts = reference.prepare_weights(
        plan=plan, params_dtype=torch.bfloat16, w1_fp4=prepared.w1_fp4.cpu(), w2_fp4=prepared.w2_fp4.cpu(),
        w1_blockscale=prepared.w1_blockscale.cpu(), w2_blockscale=prepared.w2_blockscale.cpu(),
        w1_global_scale=native.w13_global_scale.cpu(), w2_global_scale=native.w2_global_scale.cpu(),
        a1_gscale=prepared.a1_gscale.cpu(), a2_gscale=prepared.a2_gscale.cpu(),
    )  # fmt: skip
    results = {}
    for a4 in (False, True):
        rows, topk = given.ids.shape
        made = reference.plan(
            reference.Caps(
                max_tokens=max(rows, 9), num_topk=topk, device="cpu", weight_plan=plan,
                quant_mode="nvfp4" if a4 else "w4a16",
            )
        )  # fmt: skip
        output = torch.empty(given.x.shape, dtype=torch.bfloat16)
        scratch = torch.empty(made.scratch_specs()[0].shape[0], dtype=torch.uint8)
        binding = reference.bind(
            made, scratch=scratch, a=given.x.cpu(), experts=experts, topk_weights=given.weights.cpu(),
            topk_ids=given.ids.cpu(), output=output,
        )  # fmt: skip
        results[a4] = reference.run(binding=binding).float()
    return results


def mixed_steps() -> dict[str, Any]:
    """Random mixed steps: which mode each row ran in, decided from its output alone, and the largest errors."""
    start()
    import torch

    from rows import harness
    from rows.test_mixed_steps import random_ranges

    rng = random.Random(0)
    wrong, steps, errors = 0, 0, {"w4a16": 0.0, "nvfp4": 0.0}
    for topk in (2, 3):
        geometry = harness.Geometry(topk=topk)
        layer = load(geometry)
        for seed in range(8):
            rows = rng.choice((1, 7, 8, 9, 17, 40))
            given = batch(rows, geometry, seed)
            wanted = expected(layer, given)
            for _ in range(5):
                ranges = random_ranges(rng, rows)
                with harness.step(rows, ranges):
                    output = harness.call(layer, given).float().cpu()
                distance = {
                    a4: (output - result).norm(dim=1) / result.norm(dim=1)
                    for a4, result in wanted.items()
                }
                ran_a4 = distance[True] < distance[False]
                is_prefill = torch.zeros(rows, dtype=torch.bool)
                for lo, hi in ranges:
                    is_prefill[lo:hi] = True
                wrong += int((ran_a4 != is_prefill).sum())
                steps += 1
                for name, a4 in (("w4a16", False), ("nvfp4", True)):
                    chosen = distance[a4][is_prefill == a4]
                    errors[name] = max(errors[name], float(chosen.max()) if chosen.numel() else 0.0)
    return {"wrong_rows": wrong, "steps": steps, "errors": errors}


def nothing_compiles() -> dict[str, Any]:
    """vLLM's b12x warm-up, then every slice size of both modes with b12x's kernel resolution frozen."""
    start()
    import torch
    from b12x._lib.runtime_control import kernel_resolution_guard
    from vllm.model_executor.layers.fused_moe.b12x_a4 import warmup

    from rows import harness

    geometry = harness.Geometry()
    layer = load(geometry)
    launches = warmup.compile_launches(harness.experts_of(layer), MAX_ROWS)
    given = batch(MAX_ROWS, geometry, 0)
    calls = 0
    with kernel_resolution_guard("sweep after the warm-up"):
        for rows in range(1, MAX_ROWS + 1):
            part = harness.Batch(
                given.x[:rows], given.weights[:rows].clone(), given.ids[:rows].clone()
            )
            for ranges in ([], [(0, rows)], [(1, rows)] if rows > 1 else []):
                with harness.step(rows, ranges):
                    harness.call(layer, part)
                calls += 1
    torch.cuda.synchronize()
    return {"warm_up_launches": launches, "calls": calls}


def replay_after_reload() -> dict[str, Any]:
    """Capture a decode call, reload other weights, replay: the result of the new weights run eagerly, bit for bit."""
    start()
    import torch
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from rows import harness
    from rows.test_reload import checkpoint, reload_weights

    geometry = harness.Geometry()
    model = torch.nn.Module()
    with torch.device("cuda"):
        model.experts = layer = harness.make_layer("NVFP4", geometry)
        record_metadata_for_reloading(model)
    donor = harness.make_layer("NVFP4", geometry)
    harness.fill(donor, 0)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(donor, name))
    layer.quant_method.process_weights_after_loading(layer)
    given = batch(4, geometry, 0)
    with harness.step(4, [(0, 2)]):  # a capture stays W4A16, whatever the step says
        for _ in range(2):
            harness.call(layer, given)
        with harness.step(None):
            harness.call(layer, given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = harness.call(layer, given)
    graph.replay()
    torch.cuda.synchronize()
    old = output.clone()
    entries = [
        (name, expert, shard, value.cuda())
        for name, expert, shard, value in checkpoint(1, geometry)
    ]
    reload_weights(model, layer, entries)
    graph.replay()
    torch.cuda.synchronize()
    with harness.step(None):
        eager = harness.call(layer, given)
    with harness.step(4, [(0, 4)]):
        a4 = harness.call(layer, given)
    return {
        "replay equals eager": output.equal(eager),
        "replay changed": not output.equal(old),
        "a4 runs after the reload": bool(a4.isfinite().all()) and not a4.equal(eager),
    }


CASES = {case.__name__: case for case in (mixed_steps, nothing_compiles, replay_after_reload)}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]]()), flush=True)
