# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel that a dual-plan layer can reach, before CUDA graphs are captured and requests arrive.

What b12x compiles for a call depends on the plan (mode, capacity) and, within it, on the number of rows. So for each
capacity of both modes the fewest and the most rows that bind to it are launched once; in between nothing changes that
does not already differ at the ends. Whether that holds is measured where kernels run: a sweep of all slice sizes after
the warm-up must compile nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.fused_moe.b12x_a4.plans import NVFP4, W4A16, rows_per_launch

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
