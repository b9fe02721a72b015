# SPDX-License-Identifier: Apache-2.0
"""The codec against golden vectors, a slow codec, and bad streams; the same with numpy and with torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from b12x_overlay.csf.core import CsfStreamError, codec
from csf.streams import Golden, golden, plausible_scales, slow_encode
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


def as_numpy(array):
    return np.asarray(array)


def as_torch(array):
    return torch.from_numpy(np.array(array))


KINDS = pytest.mark.parametrize("kind", [as_numpy, as_torch], ids=["numpy", "torch"])


def shapes(max_slabs: int = 4, max_pairs: int = 12):
    return st.tuples(st.integers(1, max_slabs), st.integers(1, max_pairs)).map(
        lambda size: (size[0] * 16, size[1] * 2)
    )


def matrices():
    """Scales of several characters: anything, a narrow band with strays, few different values."""
    anything = shapes().flatmap(lambda shape: hnp.arrays(np.uint8, shape))
    band = shapes().flatmap(
        lambda shape: hnp.arrays(
            np.uint8, shape, elements=st.integers(0x30, 0x4C), fill=st.nothing()
        )
    )
    few = shapes().flatmap(
        lambda shape: hnp.arrays(
            np.uint8, shape, elements=st.sampled_from([0, 0x38, 0x7E, 0x7F, 0xFF])
        )
    )
    return st.one_of(anything, band, few)


@KINDS
@pytest.mark.parametrize("case", golden(), ids=lambda case: case.name)
def test_golden_vectors(case: Golden, kind) -> None:
    streams = codec.encode(kind(case.scales), case.name)
    assert np.asarray(streams.fixed).tobytes() == case.fixed
    assert np.asarray(streams.exceptions).tolist() == case.exceptions
    given_streams = codec.CsfStreams(
        *case.scales.shape,
        kind(np.frombuffer(case.fixed, np.uint8)),
        kind(np.array(case.exceptions, "<u4")),
    )
    assert np.array_equal(np.asarray(codec.decode(given_streams)), case.scales)


@settings(max_examples=60, deadline=None)
@given(matrices())
def test_encoder_equals_the_slow_one_and_decodes(scales: np.ndarray) -> None:
    fixed, exceptions = slow_encode(scales)
    for kind in (as_numpy, as_torch):
        streams = codec.encode(kind(scales))
        assert np.asarray(streams.fixed).tobytes() == fixed
        assert np.asarray(streams.exceptions).tolist() == exceptions
        assert np.array_equal(np.asarray(codec.decode(streams)), scales)


def test_parts_of_a_large_matrix_meet() -> None:
    """The numpy encoder works on row blocks; a row's result must not depend on its block."""
    scales = plausible_scales(4096, 64)
    whole = codec.encode(scales)
    halves = [codec.encode(scales[:1040]), codec.encode(scales[1040:])]
    joined = codec.concat_rows(halves)
    assert np.array_equal(whole.fixed, joined.fixed)
    assert np.array_equal(whole.exceptions, joined.exceptions)


@settings(max_examples=60, deadline=None)
@given(matrices(), st.data())
def test_slicing_and_joining_without_decoding(scales: np.ndarray, data: st.DataObject) -> None:
    rows, columns = scales.shape
    low = data.draw(st.integers(0, rows // 16 - 1)) * 16
    high = data.draw(st.integers(low // 16 + 1, rows // 16)) * 16
    left = data.draw(st.integers(0, columns // 2 - 1)) * 2
    right = data.draw(st.integers(left // 2 + 1, columns // 2)) * 2
    for kind in (as_numpy, as_torch):
        streams = codec.encode(kind(scales))
        by_row = codec.slice_rows(streams, low, high)
        by_column = codec.slice_columns(by_row, left, right)
        assert np.array_equal(np.asarray(codec.decode(by_row)), scales[low:high])
        assert np.array_equal(np.asarray(codec.decode(by_column)), scales[low:high, left:right])
        # Rows keep their windows, so a row slice is what the encoder would make of the slice.
        again = codec.encode(kind(scales[low:high].copy()))
        assert np.array_equal(np.asarray(by_row.fixed), np.asarray(again.fixed))
        both = codec.concat_rows([by_row, streams])
        expected = np.concatenate([scales[low:high], scales])
        assert np.array_equal(np.asarray(codec.decode(both)), expected)


@settings(max_examples=40, deadline=None)
@given(matrices(), st.integers(0, 2), st.integers(0, 3))
def test_padding(scales: np.ndarray, slabs: int, pairs: int) -> None:
    rows, columns = scales.shape
    for kind in (as_numpy, as_torch):
        padded = codec.pad(codec.encode(kind(scales)), rows + 16 * slabs, columns + 2 * pairs)
        found = np.asarray(codec.decode(padded))
        assert np.array_equal(found[:rows, :columns], scales)
        assert (found[rows:] == 0x38).all()
        assert not np.isin(found[:rows, columns:], [0x7F, 0xFF]).any()


@KINDS
def test_padding_columns_are_never_nan(kind) -> None:
    """A row of 0x8E has the base 0x7F, which is NaN, and zero weights times NaN are NaN."""
    streams = codec.encode(kind(np.full((16, 2), 0x8E, np.uint8)))
    assert int(streams.fixed[0]) == 0x7F
    padded = np.asarray(codec.decode(codec.pad(streams, 16, 4)))
    assert padded.tolist() == [[0x8E, 0x8E, 0x80, 0x80]] * 16


def streams_with(**changes) -> codec.CsfStreams:
    return replace(codec.encode(plausible_scales(32, 8), "layers.3.up.weight_scale"), **changes)


def words(*positions: int) -> np.ndarray:
    return np.array([0x7E000000 | p for p in positions], "<u4")


def base_of_row_17(value: int) -> np.ndarray:
    fixed = streams_with().fixed.copy()
    fixed[16 * 5 + 1] = value
    return fixed


BAD = [
    ({"fixed": np.zeros(159, np.uint8)}, "fixed", 159, "159 bytes; 32 x 8 scales take 160"),
    ({"fixed": np.zeros(176, np.uint8)}, "fixed", 160, "176 bytes"),
    ({"fixed": np.zeros(160, np.int8)}, "fixed", 0, "int8"),
    ({"fixed": np.zeros((2, 80), np.uint8)}, "fixed", 0, "(2, 80)"),
    ({"fixed": base_of_row_17(241)}, "fixed", 81, "base 241 of row 17 is above 240"),
    ({"exceptions": np.zeros(3, np.int32)}, "exceptions", 0, "int32"),
    ({"exceptions": words(3, 256)}, "exceptions", 4, "position 256 is outside the 32 x 8 matrix"),
    ({"exceptions": words(3, 9, 9)}, "exceptions", 8, "position 9 appears twice"),
    ({"exceptions": words(3, 9, 8)}, "exceptions", 8, "position 8 comes after 9"),
    ({"rows": 24}, "geometry", 0, "24 rows; a multiple of 16"),
    ({"columns": 7}, "geometry", 0, "7 columns; an even number"),
    ({"rows": 1 << 20, "columns": 32}, "geometry", 0, "more than the 16777216 positions"),
    ({"rows": 0}, "geometry", 0, "0 rows"),
]


@KINDS
@pytest.mark.parametrize(("changes", "stream", "offset", "reason"), BAD)
def test_bad_streams_are_named(kind, changes, stream, offset, reason) -> None:
    good = streams_with(**changes)
    bad = replace(good, fixed=kind(good.fixed), exceptions=kind(good.exceptions))
    with pytest.raises(CsfStreamError) as caught:
        codec.decode(bad)
    assert (caught.value.tensor, caught.value.stream, caught.value.offset) == (
        "layers.3.up.weight_scale",
        stream,
        offset,
    )
    assert reason in str(caught.value)
    assert "layers.3.up.weight_scale" in str(caught.value)


def test_a_base_of_240_is_good() -> None:
    fixed = base_of_row_17(240)
    decoded = codec.decode(streams_with(fixed=fixed, exceptions=words()))
    assert decoded[17, 0] == 240 + (fixed[16 * 5 + 16 + 4] & 15)


@pytest.mark.parametrize("bounds", [(8, 16), (0, 24), (16, 16), (0, 48), (-16, 16)])
def test_row_bounds_inside_a_slab_are_refused(bounds) -> None:
    with pytest.raises(CsfStreamError, match="multiples of 16"):
        codec.slice_rows(streams_with(), *bounds)


@pytest.mark.parametrize("bounds", [(1, 4), (0, 3), (4, 4), (0, 10)])
def test_column_bounds_inside_a_pair_are_refused(bounds) -> None:
    with pytest.raises(CsfStreamError, match="must be even"):
        codec.slice_columns(streams_with(), *bounds)


@pytest.mark.parametrize("scales", [np.zeros((16, 4), np.int8), np.zeros(64, np.uint8)])
def test_encoder_wants_a_matrix_of_bytes(scales) -> None:
    with pytest.raises(CsfStreamError, match="uint8"):
        codec.encode(scales)


def test_unequal_columns_are_not_joined() -> None:
    parts = [codec.encode(plausible_scales(16, 8), "a"), codec.encode(plausible_scales(16, 4), "b")]
    with pytest.raises(CsfStreamError, match=r"b: geometry: 4 columns beside 8 of a"):
        codec.concat_rows(parts)
