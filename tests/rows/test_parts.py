# SPDX-License-Identifier: Apache-2.0
"""Splitting a step's rows: pure host arithmetic, checked row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def parts(vllm_on_cpu: None) -> Any:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import parts

    return parts


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, int], ...]]:
    rows = draw(st.integers(1, 200))
    cuts = sorted(draw(st.sets(st.integers(0, rows), max_size=40)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return rows, tuple(pairs)


@settings(max_examples=300, deadline=None)
@given(step=steps(), limit=st.integers(1, 12))
def test_every_row_once_and_of_its_type(parts: Any, step: Any, limit: int) -> None:
    rows, prefill = step
    split = parts.make_split(rows, prefill, limit)
    order = range(rows) if split.order is None else split.order.tolist()
    seen: dict[int, bool] = {}
    at = 0
    for part in split.parts:
        assert part.lo == at < part.hi
        at = part.hi
        for place in range(part.lo, part.hi):
            assert order[place] not in seen
            seen[order[place]] = part.a4
    assert at == rows
    assert seen == {row: any(lo <= row < hi for lo, hi in prefill) for row in range(rows)}
    assert split.a4_rows == sum(seen.values())
    assert len(split.parts) <= max(limit, 2)


@settings(max_examples=100, deadline=None)
@given(step=steps())
def test_gather_keeps_the_order_within_a_type(parts: Any, step: Any) -> None:
    split = parts.make_split(*step, 1)
    if split.order is not None:
        others = split.num_rows - split.a4_rows
        for group in (split.order[:others], split.order[others:]):
            assert (group[1:] > group[:-1]).all()


@pytest.mark.parametrize(
    "prefill", [((3, 2),), ((0, 2), (1, 4)), ((2, 2),), ((0, 9),), ((4, 6), (0, 2)), ((-1, 3),)]
)
def test_impossible_ranges_are_refused(parts: Any, prefill: Any) -> None:
    with pytest.raises(ValueError, match="not ordered ranges within 8 rows"):
        parts.split_rows(8, prefill)


def test_split_is_made_once_per_step(parts: Any) -> None:
    from vllm.v1.worker.moe_row_types import MoERowTypes

    cache = parts.SplitCache()
    step = MoERowTypes(8, ((2, 5),))
    split, first = cache.get(step)
    again, second = cache.get(step)
    assert split is again
    assert (first, second) == (True, False)
    other, first = cache.get(MoERowTypes(8, ((2, 5),)))
    assert first, "equal row types of another step are another step"
    assert other is not split


def test_order_is_copied_once(parts: Any) -> None:
    split = parts.make_split(6, ((0, 1), (2, 3), (4, 5)), 2)
    device = torch.device("cpu")
    index = split.order_on(device)
    assert index.tolist() == [1, 3, 5, 0, 2, 4]
    assert split.order_on(device) is index
