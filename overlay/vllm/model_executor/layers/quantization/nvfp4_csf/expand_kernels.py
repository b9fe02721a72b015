# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that expand resident planes into the shared F8_128x4 scratch.

The layout they read is that of `planes`: because the codes of the first and the second half of a slab share bytes,
a 16-byte load of codes becomes two 16-byte stores that are each contiguous over the warp, and four scales cost one
``and`` and one multiply-add (``base + code`` is at most 255, so no byte carries into the next). Exceptions are stored
last, by the same program, after a barrier.

One program expands one tile: ``SLABS`` neighbouring slabs of an expert, or one of ``PARTS`` pieces of a slab.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _expand_tile(
    fixed,  # *u32: ScalePlanes.fixed of all experts
    exceptions,  # *i32
    offsets,  # *i32
    out,  # *u32: expanded plane of all experts
    expert,
    tile,  # of this expert
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLABS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks per load
    EXCEPTIONS: tl.constexpr,  # exceptions per load
):
    # Sizes are in 32-bit words. A chunk is what one warp takes per load: 32 lanes of 4 words, or 16 lanes where half a
    # slab is not a multiple of 128 words (COLUMNS % 8 == 4).
    HALF: tl.constexpr = 16 * COLUMNS
    STRIDE: tl.constexpr = 32 + HALF
    LANES: tl.constexpr = 32 if COLUMNS % 8 == 0 else 16
    PART: tl.constexpr = HALF // (4 * LANES) // PARTS

    part = tile % PARTS
    slab = expert * (ROWS // 128) + tile // PARTS * SLABS

    # The first exceptions are read before anything is stored, so that their latency hides behind that of the codes.
    begin = tl.load(offsets + slab)
    end = tl.load(offsets + slab + SLABS)
    which = begin + tl.arange(0, EXCEPTIONS)
    words = tl.load(exceptions + which, mask=which < end, other=0)

    # Codes and results have one flat dimension for (slab, chunk, lane): with three, Triton's coalescing breaks ties
    # between strided dimensions by their number and may give neighbouring threads to neighbouring chunks, 16 bytes
    # every 512. The bases have three, so that a thread loads one word per slab; the reshape moves nothing.
    thread = tl.arange(0, SLABS * CHUNKS * LANES)[:, None]
    g = thread // (LANES * CHUNKS)
    inside = thread % (LANES * CHUNKS) * 4 + tl.arange(0, 4)[None, :]
    g4 = tl.arange(0, SLABS)[:, None, None, None]
    c4 = tl.arange(0, CHUNKS)[None, :, None, None]
    lane4 = tl.arange(0, LANES)[None, None, :, None]
    shift4 = 8 * tl.arange(0, 4)[None, None, None, :]
    ALL: tl.constexpr = (SLABS, CHUNKS, LANES, 4)
    FLAT: tl.constexpr = (SLABS * CHUNKS * LANES, 4)
    source = fixed + slab.to(tl.int64) * STRIDE
    target = out + slab.to(tl.int64) * (2 * HALF)
    for step in tl.static_range(0, PART, CHUNKS):
        chunk = part * PART + step
        codes = tl.load(source + 32 + chunk * (4 * LANES) + (g * STRIDE + inside))
        if LANES == 32:
            base = tl.load(source + (g4 * STRIDE + lane4))
            low = tl.reshape(tl.broadcast_to((base >> shift4 & 0xFF) * 0x01010101, ALL), FLAT)
            high = low
        else:
            odd = (chunk + c4) % 2
            base = tl.load(source + (g4 * STRIDE + odd * 16 + lane4))
            low = tl.reshape(tl.broadcast_to((base >> shift4 & 0xFF) * 0x01010101, ALL), FLAT)
            base = tl.load(source + (g4 * STRIDE + (1 - odd) * 16 + lane4))
            high = tl.reshape(tl.broadcast_to((base >> shift4 & 0xFF) * 0x01010101, ALL), FLAT)
        place = target + chunk * (4 * LANES) + (g * (2 * HALF) + inside)
        tl.store(place, (codes & 0x0F0F0F0F) + low)
        tl.store(place + HALF, (codes >> 4 & 0x0F0F0F0F) + high)

    if end > begin:
        tl.debug_barrier()  # another thread of this program may have stored the word that an exception changes
        plane = out.to(tl.pointer_type(tl.uint8)) + expert.to(tl.int64) * (ROWS * COLUMNS)
        while begin < end:
            spot = words & 0xFFFFFF
            keep = which < end
            if PARTS > 1:
                keep = keep & (spot % (4 * HALF) // (16 * LANES * PART) == part)
            tl.store(plane + spot, (words >> 24).to(tl.uint8), mask=keep)
            begin += EXCEPTIONS
            which += EXCEPTIONS
            words = tl.load(exceptions + which, mask=which < end, other=0)


@triton.jit
def _expand_either(
    fixed13,
    exceptions13,
    offsets13,
    out13,
    fixed2,
    exceptions2,
    offsets2,
    out2,
    expert,
    tile,  # of this expert, those of w13 first
    TILES13: tl.constexpr,
    ROWS13: tl.constexpr,
    COLUMNS13: tl.constexpr,
    SLABS13: tl.constexpr,
    PARTS13: tl.constexpr,
    CHUNKS13: tl.constexpr,
    ROWS2: tl.constexpr,
    COLUMNS2: tl.constexpr,
    SLABS2: tl.constexpr,
    PARTS2: tl.constexpr,
    CHUNKS2: tl.constexpr,
    EXCEPTIONS: tl.constexpr,
):
    if tile < TILES13:
        _expand_tile(
            fixed13, exceptions13, offsets13, out13, expert, tile,
            ROWS13, COLUMNS13, SLABS13, PARTS13, CHUNKS13, EXCEPTIONS,
        )  # fmt: skip
    else:
        _expand_tile(
            fixed2, exceptions2, offsets2, out2, expert, tile - TILES13,
            ROWS2, COLUMNS2, SLABS2, PARTS2, CHUNKS2, EXCEPTIONS,
        )  # fmt: skip


@triton.jit
def expand_all(
    fixed13,
    exceptions13,
    offsets13,
    out13,
    fixed2,
    exceptions2,
    offsets2,
    out2,
    TILES13: tl.constexpr,  # tiles per expert
    TILES2: tl.constexpr,
    ROWS13: tl.constexpr,
    COLUMNS13: tl.constexpr,
    SLABS13: tl.constexpr,
    PARTS13: tl.constexpr,
    CHUNKS13: tl.constexpr,
    ROWS2: tl.constexpr,
    COLUMNS2: tl.constexpr,
    SLABS2: tl.constexpr,
    PARTS2: tl.constexpr,
    CHUNKS2: tl.constexpr,
    EXCEPTIONS: tl.constexpr,
):
    """Every expert, both planes. Grid: ``(E * (TILES13 + TILES2),)``."""
    task = tl.program_id(0)
    _expand_either(
        fixed13, exceptions13, offsets13, out13, fixed2, exceptions2, offsets2, out2,
        task // (TILES13 + TILES2), task % (TILES13 + TILES2), TILES13,
        ROWS13, COLUMNS13, SLABS13, PARTS13, CHUNKS13, ROWS2, COLUMNS2, SLABS2, PARTS2, CHUNKS2, EXCEPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def expand_routed(
    fixed13,
    exceptions13,
    offsets13,
    out13,
    fixed2,
    exceptions2,
    offsets2,
    out2,
    ids,  # *i32 or *i64 [count]: expert ids; ids outside [0, EXPERTS) name no expert
    count,
    TILES13: tl.constexpr,
    TILES2: tl.constexpr,
    ROWS13: tl.constexpr,
    COLUMNS13: tl.constexpr,
    SLABS13: tl.constexpr,
    PARTS13: tl.constexpr,
    CHUNKS13: tl.constexpr,
    ROWS2: tl.constexpr,
    COLUMNS2: tl.constexpr,
    SLABS2: tl.constexpr,
    PARTS2: tl.constexpr,
    CHUNKS2: tl.constexpr,
    EXCEPTIONS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    IDS: tl.constexpr,  # ids per load
):
    """Only the experts in *ids*, both planes.

    Grid: ``(n * (TILES13 + TILES2),)`` with n = *count*, one group of programs per id (all but the first of equal ids
    do nothing), or with ``BY_EXPERT`` n = EXPERTS, one group per expert (those without an id do nothing).
    """
    task = tl.program_id(0)
    slot = task // (TILES13 + TILES2)
    if BY_EXPERT:
        expert = slot
        scanned = count
    else:
        expert = tl.load(ids + slot).to(tl.int32)
        scanned = slot
    seen = tl.zeros((IDS,), tl.int32)
    for start in range(0, scanned, IDS):
        index = start + tl.arange(0, IDS)
        other = tl.load(ids + index, mask=index < scanned, other=-1).to(tl.int32)
        seen += (other == expert).to(tl.int32)
    found = tl.sum(seen, 0) > 0
    active = found if BY_EXPERT else (found == 0) & (expert >= 0) & (expert < EXPERTS)
    if active:
        _expand_either(
            fixed13, exceptions13, offsets13, out13, fixed2, exceptions2, offsets2, out2,
            expert, task % (TILES13 + TILES2), TILES13,
            ROWS13, COLUMNS13, SLABS13, PARTS13, CHUNKS13, ROWS2, COLUMNS2, SLABS2, PARTS2, CHUNKS2, EXCEPTIONS,
        )  # fmt: skip
