# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that a dual-plan layer can reach, before CUDA graphs are captured and requests arrive.

What b12x compiles for a call depends on the plan (mode, capacity) and, within it, on the number of rows. So for each
capacity of both modes the fewest and the most rows that bind to it are launched once; in between nothing changes that
does not already differ at the ends. Whether that holds is measured where kernels run: a sweep of all slice sizes after
the warm-up must compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.b12x_a4.plans import (
    NVFP4,
    SMALL_ROWS,
    W4A16,
    bucket_edges,
    rows_per_launch,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import get_settings
from vllm.utils.b12x import B12xWarmupUnit

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.b12x_a4.experts import DualPlanExperts


def launch_sizes(experts: DualPlanExperts, max_rows: int, topk: int) -> list[tuple[bool, int]]:
    """``(a4, rows)`` of every warm-up launch, both ends of each capacity."""
    shared, w4a16 = experts._sets(topk)
    sizes = []
    for plan_set, a4 in ((w4a16, False), (shared, True)):
        if a4 and experts._dual.scales is None:
            continue
        mode = NVFP4 if a4 and NVFP4 in shared.modes else W4A16
        for fewest, capacity in plan_set.capacities(max_rows):
            limit = rows_per_launch(plan_set.plan(mode, capacity)) if a4 else capacity
            ends = {min(fewest, limit), min(capacity, max_rows, limit)}
            sizes += [(a4, rows) for rows in sorted(ends)]
    return sizes


@torch.inference_mode()
def compile_launches(experts: DualPlanExperts, max_rows: int) -> int:
    """Launch every size of :func:`launch_sizes` on zeros and return how many that were."""
    prepared = experts._prepared()
    device = prepared.w1_fp4.device
    topk = int(experts.moe_config.experts_per_token)
    num_experts = int(prepared.num_experts)
    hidden = torch.zeros(
        (max_rows, int(prepared.hidden_size)), dtype=experts.moe_config.in_dtype, device=device
    )
    output = torch.empty_like(hidden)
    ids = torch.arange(topk, device=device, dtype=torch.int32).remainder_(num_experts)
    ids = ids.unsqueeze(0).expand(max_rows, -1).contiguous()
    weights = torch.full((max_rows, topk), 1.0 / topk, dtype=torch.float32, device=device)
    scratch = torch.empty(
        (experts._scratch_nbytes(max_rows, topk),), dtype=torch.uint8, device=device
    )
    sizes = launch_sizes(experts, max_rows, topk)
    for a4, rows in sizes:
        experts._launch(a4, scratch, hidden[:rows], weights[:rows], ids[:rows], output[:rows])
    return len(sizes)


def all_units(
    collect: Callable[..., Iterable[B12xWarmupUnit]],
    worker: Any,
    token_counts: tuple[int, ...],
    output_dtype: torch.dtype,
) -> Iterable[B12xWarmupUnit]:
    """The units of ``b12x_warmup``: *collect* (upstream's) for the target model, and with A4 prefill on also for the
    draft model, and more row counts for layers that are not armed.

    Upstream launches one row count per planned regime of a layer, the smallest; but W4A16's packed kernels are
    compiled for one row apart from more rows, and for up to 8 rows apart from more.
    """
    units = list(collect(worker.get_model(), token_counts, output_dtype))
    if not get_settings().enabled:
        return units
    draft_model = worker.get_draft_model()
    if draft_model is not None:
        known = {unit.key for unit in units}
        draft_units = collect(draft_model, token_counts, output_dtype)
        units += [unit for unit in draft_units if unit.key not in known]
    more = _unarmed_row_counts(max(token_counts, default=1))
    for model in (worker.get_model(), draft_model):
        units += (
            _unarmed_units(model, more, {unit.key for unit in units}) if model is not None else []
        )
    return units


def _unarmed_row_counts(max_rows: int) -> list[int]:
    edges = bucket_edges(max_rows)
    larger = {*edges, *(edge + 1 for edge in edges if edge >= SMALL_ROWS)}
    return sorted(rows for rows in larger if rows <= max_rows)


def _unarmed_units(
    model: torch.nn.Module, row_counts: list[int], known: set[Any]
) -> list[B12xWarmupUnit]:
    from vllm.model_executor.layers.fused_moe.b12x import B12xExperts

    units = []
    for layer in model.modules():
        experts = getattr(layer, "b12x_warmup_provider", None)
        if type(experts) is not B12xExperts or experts._source_format != "modelopt_nvfp4":
            continue
        unit = experts.get_b12x_warmup_unit(layer, (1,), experts.moe_config.in_dtype)
        key = ("more rows", unit.key)
        if key in known:
            continue
        known.add(key)

        def compile(experts: B12xExperts = experts, layer: torch.nn.Module = layer) -> None:
            for (
                rows
            ) in row_counts:  # one count a call, or upstream launches the smallest of a regime only
                experts.warmup_launches(layer, token_counts=(rows,))

        units.append(B12xWarmupUnit(name=unit.name, key=key, compile=compile))
    return units
