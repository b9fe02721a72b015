# SPDX-License-Identifier: Apache-2.0
"""Execution plans of one prepared weight set: few capacities, both modes, and the scratch they need.

b12x fixes a launch's regime when it plans for a capacity and then accepts any number of rows up to it. A step's parts
have arbitrary lengths, so plans are made for bucketed capacities:

* 1 to 8 rows: their own capacity each. These are the capacities of the small-token kernels (W4A16 direct, NVFP4
  micro), which need ids and weights at 16-byte addresses.
* above: four capacities per power of two (at most a quarter too large), and the largest step the scheduler makes.

A part of more than 8 rows always binds a capacity above 8 and the other way round, so which kernels a part can reach
follows from its own length alone; the warm-up relies on that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

SMALL_ROWS = 8
"""Largest capacity of b12x's small-token kernels (``_W4A16_SMALL_M_DIRECT_MAX_M``, ``_MICRO_MAX_TOKENS``)."""

NVFP4 = "nvfp4"
W4A16 = "w4a16"


def bucket_edge(rows: int) -> int:
    """Smallest capacity that holds *rows*: exact up to 8, then multiples of a quarter of the power of two below."""
    if rows <= SMALL_ROWS:
        return max(rows, 1)
    step = (1 << (rows - 1).bit_length()) // 8
    return -(-rows // step) * step


def bucket_edges(max_rows: int) -> list[int]:
    """All capacities up to the one that holds *max_rows*."""
    edges = [1]
    while edges[-1] < max_rows:
        edges.append(bucket_edge(edges[-1] + 1))
    return edges


class PlanSet:
    """Plans over one weight plan, shared by all layers whose weight plan, top-k and clamp are equal.

    Args:
        make_plan: makes the plan of (quant mode, capacity).
        modes: quant modes that may be launched.
        scratch_nbytes: scratch bytes of a plan.
        max_rows: largest step, where known; capacities below it are never rounded beyond it.
        is_capturing: whether a CUDA graph is being captured, when no plan may be made.
    """

    def __init__(
        self,
        make_plan: Callable[[str, int], Any],
        modes: tuple[str, ...],
        scratch_nbytes: Callable[[Any], int],
        max_rows: int | None,
        is_capturing: Callable[[], bool],
    ) -> None:
        self._make_plan = make_plan
        self._scratch_nbytes = scratch_nbytes
        self._max_rows = max_rows
        self._is_capturing = is_capturing
        self._plans: dict[tuple[str, int], Any] = {}
        self._by_rows: dict[tuple[str, int], Any] = {}
        self._scratch_by_rows: dict[int, int] = {}
        self._scratch_by_edge: dict[int, int] = {}
        self.modes = modes

    def capacity(self, rows: int) -> int:
        """Capacity of the plan that *rows* bind to."""
        edge = bucket_edge(rows)
        if self._max_rows is not None and rows <= self._max_rows < edge:
            return self._max_rows
        return edge

    def plan(self, mode: str, rows: int) -> Any:
        """The plan for *rows* rows of *mode*.

        Raises:
            RuntimeError: it would have to be made while a CUDA graph is captured.
        """
        key = (mode, rows)
        plan = self._by_rows.get(key)
        if plan is None:
            plan = self._by_rows[key] = self._at_capacity(mode, self.capacity(rows))
        return plan

    def scratch_nbytes(self, rows: int) -> int:
        """Bytes that serve every split of *rows* rows into launches of either mode; never decreasing in *rows*.

        The maximum runs over every capacity up to the one of *rows*: b12x's own sizes are not monotone on every
        device, nor is one mode's always the larger.
        """
        nbytes = self._scratch_by_rows.get(rows)
        if nbytes is None:
            nbytes = self._scratch_by_rows[rows] = self._scratch_up_to(self.capacity(rows))
        return nbytes

    def capacities(self, max_rows: int) -> Iterator[tuple[int, int]]:
        """``(fewest, capacity)``: every capacity that calls of up to *max_rows* rows can reach."""
        rows = 1
        while rows <= max_rows:
            capacity = self.capacity(rows)
            yield rows, capacity
            rows = capacity + 1

    def _scratch_up_to(self, capacity: int) -> int:
        known = self._scratch_by_edge.get(capacity)
        if known is not None:
            return known
        enough = 0
        for _, edge in self.capacities(capacity):
            before = enough
            enough = self._scratch_by_edge.get(edge, 0)
            if not enough:
                own = (self._scratch_nbytes(self._at_capacity(mode, edge)) for mode in self.modes)
                enough = self._scratch_by_edge[edge] = max(before, *own)
        return enough

    def _at_capacity(self, mode: str, capacity: int) -> Any:
        key = (mode, capacity)
        plan = self._plans.get(key)
        if plan is None:
            if self._is_capturing():
                raise RuntimeError(
                    f"no b12x plan for {capacity} {mode} rows: plans must be made before CUDA graph capture"
                )
            plan = self._plans[key] = self._make_plan(mode, capacity)
        return plan


_shared: dict[Hashable, PlanSet] = {}


def shared_plan_set(key: Hashable, make: Callable[[], PlanSet]) -> PlanSet:
    """The plan set of *key*, made once per process: a model's layers differ in weights, not in plans."""
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = make()
    return found


def rows_per_launch(plan: Any) -> int:
    """Most rows b12x runs in one launch of *plan* (the dynamic NVFP4 kernel has a limit of its own)."""
    launch = getattr(plan, "launch_plan", None)
    return int(getattr(launch, "max_tokens_per_launch", plan.caps.max_tokens))


def make_execution_plan(
    fused_moe: Any,
    *,
    weight_plan: Any,
    quant_mode: str,
    capacity: int,
    topk: int,
    device: torch.device,
    swiglu: tuple[float | None, float | None, float | None],
    share_input: bool,
) -> Any:
    """Plan *capacity* rows of *quant_mode*.

    With *share_input* (the experts hold a proof that FC1's input scale is one value) each row is quantised once
    instead of once per route, and, where b12x's own rule allows it, FC1 and FC2 run as two launches over a
    materialised intermediate. ``Caps`` leaves both off because it cannot see the scales.
    """
    limit, alpha, beta = swiglu
    caps = fused_moe.Caps(
        max_tokens=capacity,
        num_topk=topk,
        device=device,
        weight_plan=weight_plan,
        core_token_counts=(capacity,),
        route_num_experts=0,
        quant_mode=quant_mode,
        apply_router_weight_on_input=False,
        swiglu_limit=limit,
        swiglu_alpha=alpha,
        swiglu_beta=beta,
        frozen=True,
    )
    if quant_mode == NVFP4 and share_input:
        config = _share_input(caps.decode_config, weight_plan)
        if config is not caps.decode_config:
            caps = dataclasses.replace(caps, decode_config=config)
    return fused_moe.plan(caps)


def _share_input(config: Any, weight_plan: Any) -> Any:
    names = {field.name for field in dataclasses.fields(config)}
    if config.backend != "dynamic" or "nvfp4_share_input" not in names:
        return config
    # b12x's rule (_nvfp4_materialization_eligible); B12X_DYNAMIC_* overrides change what the kernel may do.
    materialize = (
        config.dynamic_tile_m == 128
        and weight_plan.activation == "silu"
        and weight_plan.hidden_size % 128 == 0
        and weight_plan.intermediate_size % 128 == 0
        and not any(name.startswith("B12X_DYNAMIC_") for name in os.environ)
    )
    changes: dict[str, bool] = {"nvfp4_share_input": True}
    if "nvfp4_materialize_intermediate" in names:
        changes["nvfp4_materialize_intermediate"] = materialize
    return dataclasses.replace(config, **changes)
