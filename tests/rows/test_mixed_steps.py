# SPDX-License-Identifier: Apache-2.0
"""A mixed step equals, row by row and bit for bit, pure W4A16 on its other rows and pure A4 on its prefill rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rows import harness


def pure_results(layer: Any, batch: harness.Batch, rows: int) -> tuple[Any, Any]:
    with harness.step(None):
        w4a16 = harness.call(layer, batch)
    with harness.step(rows, [(0, rows)]):
        a4 = harness.call(layer, batch)
    return w4a16, a4


@pytest.mark.parametrize("topk", [2, 3])
def test_random_batches(
    armed: None, reference: Any, monkeypatch: pytest.MonkeyPatch, topk: int
) -> None:
    """Top-k 3 starts most slices off a 16-byte address; up to 40 rows reach every regime. Each limit of slices in turn
    sends the same kinds of steps through slices or through the gathered form."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import parts

    limits = (parts.MAX_SLICED_PARTS, 8, 1000)
    geometry = harness.Geometry(E=4, H=128, I=64, topk=topk)
    layer = harness.load_layer(geometry)
    rng = random.Random(topk)
    launched: set[int] = set()
    for seed in range(70):
        monkeypatch.setattr(parts, "MAX_SLICED_PARTS", limits[seed % len(limits)])
        rows = rng.choice((1, 2, 7, 8, 9, 17, 24, 40))
        batch = harness.make_batch(
            rows, geometry, seed, padded=rng.choice((0, 0, 1)) if rows > 2 else 0
        )
        w4a16, a4 = pure_results(layer, batch, rows)
        assert not w4a16.equal(a4), "the two modes must differ for the comparison to mean anything"
        for _ in range(20):
            ranges = harness.random_ranges(rng, rows)
            reference.launches.clear()
            with harness.step(rows, ranges):
                mixed = harness.call(layer, batch)
            prefill = torch.zeros(rows, 1, dtype=torch.bool)
            for lo, hi in ranges:
                prefill[lo:hi] = True
            assert mixed.equal(torch.where(prefill, a4, w4a16)), (rows, ranges)
            assert sum(launch.rows for launch in reference.launches) == rows
            assert sum(launch.rows for launch in reference.launches if launch.a4) == int(
                prefill.sum()
            )
            launched.add(len(reference.launches) if len(ranges) > 4 else 0)
    assert min(launched - {0}) == 2, "the gathered form was not reached"
    assert max(launched) > 8, "more slices than the limit were not reached"
