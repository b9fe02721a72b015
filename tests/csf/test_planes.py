# SPDX-License-Identifier: Apache-2.0
"""The resident layout: exact inverse, reference expansion, and the bundled b12x's builder on the same streams."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from b12x_overlay.csf.core import CsfStreamError, codec
from csf.streams import golden, plausible_scales, swizzle
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_csf import planes

SHAPES = [(1, 128, 4), (3, 256, 32), (2, 384, 12), (4, 128, 64)]


def make(experts: int, rows: int, columns: int, seed: int = 0):
    scales = [plausible_scales(rows, columns, seed + e) for e in range(experts)]
    return np.stack(scales), [codec.encode(s, f"experts.{e}") for e, s in enumerate(scales)]


@pytest.mark.parametrize("shape", SHAPES)
def test_expansion_is_the_swizzled_source(shape) -> None:
    scales, streams = make(*shape)
    expanded = planes.expand(planes.build(streams)).numpy()
    for expert in range(shape[0]):
        assert np.array_equal(expanded[expert].reshape(-1), swizzle(scales[expert]))


@pytest.mark.parametrize("case", golden(), ids=lambda case: case.name)
def test_golden_vectors_expand_to_the_recorded_bytes(case) -> None:
    rows, columns = case.scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), np.uint8)
    padded[:rows, :columns] = case.scales
    expanded = planes.expand(planes.build([codec.encode(padded)]))
    assert hashlib.sha256(expanded.numpy().tobytes()).hexdigest() == case.swizzled_sha256


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 6), st.integers(0, 1 << 30))
def test_streams_is_the_inverse_of_build(experts: int, slabs: int, blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 256, (experts, 128 * slabs, 4 * blocks), dtype=np.uint8)
    streams = [codec.encode(s, str(e)) for e, s in enumerate(scales)]
    back = planes.streams(planes.build(streams), names=[s.name for s in streams])
    for before, after in zip(streams, back, strict=True):
        assert (before.rows, before.columns, before.name) == (after.rows, after.columns, after.name)
        assert np.array_equal(before.fixed, after.fixed)
        assert np.array_equal(before.exceptions, after.exceptions)


@pytest.mark.parametrize("shape", SHAPES)
def test_bundled_b12x_builds_the_same_planes(shape, bundled_csf) -> None:
    _, streams = make(*shape)
    ours = planes.build(streams)
    theirs = bundled_csf.make_nvfp4_csf_batch(
        [s.fixed for s in streams],
        [s.exceptions for s in streams],
        rows=shape[1],
        columns=shape[2],
        device="cpu",
    )
    # They keep the same bases in the same order, and the codes of neighbouring bytes side by side; ours share a byte
    # with those half a slab away.
    assert torch.equal(ours.fixed[..., :128], theirs.fixed[..., :128])
    half = 64 * shape[2]
    side_by_side = theirs.fixed[..., 128:]
    codes = torch.stack((side_by_side & 15, side_by_side >> 4), -1).flatten(2)
    assert torch.equal(ours.fixed[..., 128:], codes[..., :half] | codes[..., half:] << 4)
    assert torch.equal(ours.offsets[:-1].view(shape[0], -1), theirs.task_offsets[:, :-1].int())
    assert int(ours.offsets[-1]) == int(theirs.task_offsets[-1, -1])
    # Their words carry row-major positions; ours the byte's place in the expanded plane. The inverse gives theirs.
    logical = np.concatenate([s.exceptions for s in planes.streams(ours)])
    assert logical.tobytes() == theirs.exceptions.numpy().tobytes()


def test_contents_are_replaced_in_place() -> None:
    old, new = (planes.build(make(2, 128, 16, seed)[1]) for seed in (0, 100))
    addresses = [t.data_ptr() for t in (old.fixed, old.exceptions, old.offsets)]
    old.copy_(new)
    assert torch.equal(planes.expand(old), planes.expand(new))
    assert addresses == [t.data_ptr() for t in (old.fixed, old.exceptions, old.offsets)]


def test_replacement_without_room_changes_nothing() -> None:
    _, streams = make(1, 128, 16)
    tight = planes.build(streams, capacity=len(streams[0].exceptions))
    before = planes.expand(tight)
    rng = np.random.default_rng(0)
    wild = planes.build([codec.encode(rng.integers(0, 256, (128, 16), dtype=np.uint8))])
    with pytest.raises(ValueError, match="have room for"):
        tight.copy_(wild)
    assert torch.equal(planes.expand(tight), before)
    with pytest.raises(ValueError, match="cannot replace"):
        tight.copy_(planes.build(make(2, 128, 16)[1]))


@pytest.mark.parametrize("shape", [(16, 4), (128, 2), (144, 8)])
def test_other_geometries_are_refused(shape) -> None:
    with pytest.raises(CsfStreamError, match="multiples of 128"):
        planes.build([codec.encode(plausible_scales(*shape))])


def test_experts_of_different_shapes_are_refused() -> None:
    streams = [codec.encode(plausible_scales(128, c), f"experts.{c}") for c in (8, 4)]
    with pytest.raises(CsfStreamError, match=r"experts\.4: .*128 x 4 beside 128 x 8 of experts\.8"):
        planes.build(streams)


def test_bad_streams_do_not_become_planes() -> None:
    good = codec.encode(plausible_scales(128, 4), "experts.0.up_proj.weight_scale")
    bad = codec.CsfStreams(128, 4, good.fixed[:-1], good.exceptions, good.name)
    with pytest.raises(
        CsfStreamError, match=r"experts\.0\.up_proj\.weight_scale: fixed stream, byte 383"
    ):
        planes.build([bad])
