# SPDX-License-Identifier: Apache-2.0
"""Compresses logical scales to resident planes where they are, on the GPU."""

from __future__ import annotations

import torch

from . import codec
from .encode_kernels import row_bases, slab_codes, slab_exceptions
from .launch import interpreted
from .planes import SLAB_ROWS, PlaneGeometry, ScalePlanes, build, capacity_for

BASE_ROWS_PER_PROGRAM = 16
WORDS_PER_STEP = 1024


def encode(scales: torch.Tensor, *, capacity: int | None = None) -> ScalePlanes:
    """Planes of *scales*, the same as `planes.build` makes of the codec's streams.

    Args:
        scales: uint8 or float8_e4m3fn ``[E, R, C]``, logical order (not swizzled), contiguous.
        capacity: words of the exception tensor; default `capacity_for` of what there is.

    The number of exceptions is read back once, to size their tensor: a load-time function. CPU tensors take the codec.

    Raises:
        CsfStreamError: a geometry that the layout cannot hold.
        ValueError: a strided tensor, another dtype, or more exceptions than *capacity* or 2^31 - 1.
    """
    if scales.ndim != 3 or scales.element_size() != 1 or not scales.is_contiguous():
        raise ValueError(
            f"contiguous bytes [E, R, C] are needed; got {scales.dtype} {tuple(scales.shape)} "
            f"with strides {scales.stride()}"
        )
    scales = scales.view(torch.uint8)
    geometry = PlaneGeometry(*scales.shape)
    if not scales.is_cuda and not interpreted(row_bases):
        return build([codec.encode(matrix.numpy()) for matrix in scales], capacity=capacity)
    columns = geometry.columns
    slabs = geometry.experts * geometry.slabs
    fixed = torch.empty(
        (geometry.experts, geometry.slabs, geometry.slab_bytes),
        dtype=torch.uint8,
        device=scales.device,
    )
    counts = torch.empty(slabs, dtype=torch.int32, device=scales.device)
    row_bases[(slabs * SLAB_ROWS // BASE_ROWS_PER_PROGRAM,)](
        scales, fixed, COLUMNS=columns, BLOCK=_power_of_two(columns), ROWS=BASE_ROWS_PER_PROGRAM, num_warps=1,
    )  # fmt: skip
    words = scales.view(torch.uint32)
    block = min(_power_of_two(16 * columns), WORDS_PER_STEP)
    slab_codes[(slabs,)](
        words, fixed, fixed.view(torch.uint32), counts, COLUMNS=columns, BLOCK=block, num_warps=4,
    )  # fmt: skip
    offsets = torch.zeros(slabs + 1, dtype=torch.int32, device=scales.device)
    ends = counts.cumsum(0, dtype=torch.int64)
    offsets[1:] = ends
    count = int(ends[-1])
    size = capacity_for(count) if capacity is None else capacity
    if not count <= size < 1 << 31:
        raise ValueError(
            f"{count} scale exceptions do not fit a capacity of {size} (2^31 - 1 at most)"
        )
    exceptions = torch.zeros(size, dtype=torch.int32, device=scales.device)
    slab_exceptions[(slabs,)](
        words, fixed, offsets, exceptions, ROWS=geometry.rows, COLUMNS=columns, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return ScalePlanes(geometry, fixed, exceptions, offsets)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
