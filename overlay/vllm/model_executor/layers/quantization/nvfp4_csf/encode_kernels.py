# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that turn logical scales ``[E, R, C]`` into the tensors of `planes.ScalePlanes`.

Three passes: the base of every row, the codes of every slab together with the number of its exceptions, and, once the
host has sized the exception tensor, the exceptions. The bases are those of `codec`: of the windows ``[b, b + 15]``
with b in 0..240 that hold the most bytes of the row, the one with the lowest b.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_bases(
    scales,  # *u8 [E * R, C]
    fixed,  # *u8 [E * R / 128, 128 + 64 * C]
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least COLUMNS
    ROWS: tl.constexpr,
):
    """Store each row's base at its place in the slab. Grid: ``(E * R / ROWS,)``."""
    b = tl.arange(0, 256)
    column = tl.arange(0, BLOCK)
    for step in range(ROWS):
        row = tl.program_id(0) * ROWS + step
        values = tl.load(
            scales + row.to(tl.int64) * COLUMNS + column, mask=column < COLUMNS, other=0
        )
        counts = tl.histogram(values.to(tl.int32), 256, mask=column < COLUMNS)
        until = tl.cumsum(counts, 0)
        held = tl.gather(until, tl.minimum(b + 15, 255), 0) - until + counts
        # One maximum decides both: the count first, then the lower base.
        best = tl.max(tl.where(b <= 240, held * 256 + (255 - b), 0), 0)
        inside = row % 128
        place = (
            fixed
            + (row // 128).to(tl.int64) * (128 + 64 * COLUMNS)
            + inside % 32 * 4
            + inside // 32
        )
        tl.store(place, (255 - best % 256).to(tl.uint8))


@triton.jit
def _swizzled_words(scales, fixed, slab, word, COLUMNS: tl.constexpr):
    """Four scale bytes as one word, in F8_128x4 order, and the base of their row."""
    row = word % 4 * 32 + word % 128 // 4
    column = word // 128
    values = tl.load(scales + slab.to(tl.int64) * (32 * COLUMNS) + row * (COLUMNS // 4) + column)
    base = tl.load(fixed + slab.to(tl.int64) * (128 + 64 * COLUMNS) + word % 128)
    return values, base.to(tl.int32)


@triton.jit
def _code(values, base, index: tl.constexpr):
    """Code of byte *index* (0 where it lies outside the window) and whether it does."""
    code = (values >> (8 * index) & 0xFF).to(tl.int32) - base
    outside = (code < 0) | (code > 15)
    return tl.where(outside, 0, code), outside


@triton.jit
def slab_codes(
    scales,  # *u32 [E * R, C / 4]
    fixed,  # *u8, bases already there
    packed,  # *u32, the same memory as fixed
    counts,  # *i32 [E * R / 128]
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a slab's code bytes and its number of exceptions. Grid: ``(E * R / 128,)``."""
    HALF: tl.constexpr = 16 * COLUMNS
    slab = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, HALF, BLOCK):
        word = start + tl.arange(0, BLOCK)
        keep = word < HALF
        result = tl.zeros((BLOCK,), tl.int32)
        for half in tl.static_range(2):
            # Past the end the last word is read again; neither its codes nor its exceptions are kept.
            values, base = _swizzled_words(
                scales, fixed, slab, tl.minimum(word, HALF - 1) + half * HALF, COLUMNS
            )
            for index in tl.static_range(4):
                code, outside = _code(values, base, index)
                result |= code << (8 * index + 4 * half)
                total += (outside & keep).to(tl.int32)
        place = packed + slab.to(tl.int64) * (32 + HALF) + 32 + word
        tl.store(place, result.to(tl.uint32, bitcast=True), mask=keep)
    tl.store(counts + slab, tl.sum(total, 0))


@triton.jit
def slab_exceptions(
    scales,  # *u32 [E * R, C / 4]
    fixed,  # *u8
    offsets,  # *i32 [E * R / 128 + 1]
    exceptions,  # *i32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a slab's exceptions in the order of their places. Grid: ``(E * R / 128,)``."""
    WORDS: tl.constexpr = 32 * COLUMNS
    slab = tl.program_id(0)
    begin = tl.load(offsets + slab)
    end = tl.load(offsets + slab + 1)
    first_place = slab % (ROWS // 128) * (128 * COLUMNS)
    start = 0
    while (start < WORDS) & (begin < end):
        word = start + tl.arange(0, BLOCK)
        keep = word < WORDS
        values, base = _swizzled_words(scales, fixed, slab, tl.minimum(word, WORDS - 1), COLUMNS)
        found = tl.zeros((BLOCK,), tl.int32)
        for index in tl.static_range(4):
            _, outside = _code(values, base, index)
            found += (outside & keep).to(tl.int32)
        spot = begin + tl.cumsum(found, 0) - found
        for index in tl.static_range(4):
            _, outside = _code(values, base, index)
            byte = (values >> (8 * index) & 0xFF).to(tl.int32)
            tl.store(
                exceptions + spot,
                byte << 24 | (first_place + word * 4 + index),
                mask=outside & keep,
            )
            spot += (outside & keep).to(tl.int32)
        begin += tl.sum(found, 0)
        start += BLOCK
