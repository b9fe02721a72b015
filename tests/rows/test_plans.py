# SPDX-License-Identifier: Apache-2.0
"""Capacities and scratch: every split of M rows fits into what was asked for M, whatever b12x's own sizes do."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rows import harness


@pytest.fixture(scope="module")
def plans(vllm_on_cpu: None) -> Any:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans

    return plans


def plan_set(plans: Any, sizes: dict[tuple[str, int], int], max_rows: int | None = None) -> Any:
    """A plan set over a library whose scratch sizes are *sizes*, made up as they are asked for."""

    def make(mode: str, capacity: int) -> Any:
        return SimpleNamespace(
            nbytes=sizes.setdefault((mode, capacity), random.randrange(1, 10**6))
        )

    return plans.PlanSet(
        make, ("w4a16", "nvfp4"), lambda plan: plan.nbytes, max_rows, lambda: False
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), rows=st.integers(1, 3000), limit=st.none() | st.integers(1, 3000)
)
def test_scratch_serves_every_part_and_never_shrinks(
    plans: Any, seed: int, rows: int, limit: int | None
) -> None:
    random.seed(seed)
    sizes: dict[tuple[str, int], int] = {}
    made = plan_set(plans, sizes, limit)
    enough = made.scratch_nbytes(rows)
    assert enough <= made.scratch_nbytes(rows + 1)
    for part in {1, 2, 8, 9, rows, *(random.randint(1, rows) for _ in range(20))}:
        if part <= rows:
            for mode in ("w4a16", "nvfp4"):
                assert made.plan(mode, part).nbytes <= enough


def test_capacities(plans: Any) -> None:
    edges = plans.bucket_edges(1 << 15)
    assert edges[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert all(high <= low * 1.25 for low, high in pairwise(edges[8:]))
    made = plan_set(plans, {}, max_rows=1000)
    covered = list(made.capacities(1000))
    assert covered[0] == (1, 1)
    assert covered[-1] == (897, 1000), "the largest step is not rounded up"
    for rows in range(1, 1001):
        capacity = made.capacity(rows)
        assert capacity >= rows
        assert (capacity > 8) == (rows > 8), "small-token capacities are for small parts only"
    assert made.capacity(1001) >= 1001


def test_no_plan_during_capture(plans: Any) -> None:
    made = plans.PlanSet(
        lambda mode, rows: object(), ("w4a16",), lambda plan: 1, None, lambda: True
    )
    with pytest.raises(RuntimeError, match="before CUDA graph capture"):
        made.plan("w4a16", 4)


def _locked_workspace(rows: int, layer: Any, geometry: harness.Geometry) -> None:
    """As after a profile run: *rows* rows without prefill, then no more growth."""
    from vllm.v1.worker.workspace import current_workspace_manager, init_workspace_manager

    init_workspace_manager(torch.device("cpu"))
    with harness.step(None):
        harness.call(layer, harness.make_batch(rows, geometry))
    current_workspace_manager().lock()


@pytest.mark.parametrize("keep_packed", [None, "1"])
def test_locked_workspace(switches: Any, reference: Any, keep_packed: str | None) -> None:
    """After a profile run of 64 rows every smaller step, however it is split, fits. The workspace manager is used as
    on CUDA: the reference's own scratch check fails if a part got too little."""
    from vllm.v1.worker.workspace import init_workspace_manager

    switches(arm="1", force_a16="1", keep_packed=keep_packed)
    geometry = harness.Geometry(E=4, H=128, I=64, topk=2)
    layer = harness.load_layer(geometry)
    rng = random.Random(5)
    try:
        _locked_workspace(64, layer, geometry)
        for rows in (*range(1, 65, 3), 64):
            batch = harness.make_batch(rows, geometry, rows)
            for ranges in (
                [(0, rows)],
                harness.random_ranges(rng, rows),
                harness.random_ranges(rng, rows),
            ):
                with harness.step(rows, ranges):
                    harness.call(layer, batch)
        assert {launch.a4 for launch in reference.launches} == {True, False}
    finally:
        init_workspace_manager(torch.device("cpu"))


def test_real_library_sizes(armed: None) -> None:
    """Both modes of the real planner, every split of up to 40 rows in two."""
    layer = harness.load_layer(harness.Geometry())
    experts = harness.experts_of(layer)
    shared, w4a16 = experts._sets(2)
    assert shared is w4a16
    previous = 0
    for rows in range(1, 41):
        have = experts._scratch_nbytes(rows, 2)
        assert have >= previous
        previous = have
        for part in range(1, rows + 1):
            for mode in ("w4a16", "nvfp4"):
                assert shared.plan(mode, part).scratch_specs()[0].shape[0] <= have
