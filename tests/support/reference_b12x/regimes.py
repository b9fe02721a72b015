# SPDX-License-Identifier: Apache-2.0
"""Which kernel b12x plans for a capacity: its heuristics for the modes and layouts that vLLM uses here.

Valid for silu, bf16, hidden and intermediate sizes that the small-token kernels support, and no ``B12X_*`` overrides.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL_TOKENS = 8
"""Row limit of the small-token kernels."""
MICRO_ROUTES = 64
"""NVFP4 micro serves fewer routed rows than this."""
DIRECT_PACKED_TOKENS = 6
SMS = 188
"""Multiprocessors of the device that support/sm120.py pretends to be."""


@dataclass(frozen=True)
class Regime:
    """A kernel family and the numbers it was planned with."""

    backend: str
    route: str | None = None
    tile_m: int | None = None
    block_m: int | None = None


def w4a16(tokens: int, topk: int, experts: int, packed_weights: bool) -> Regime:
    """W4A16 over native weights (``packed_weights`` False) or MMA-packed ones."""
    block_m = _route_block(tokens, topk, experts)
    limit = DIRECT_PACKED_TOKENS if packed_weights else SMALL_TOKENS
    direct = tokens <= limit
    if direct and tokens > DIRECT_PACKED_TOKENS:
        routes = tokens * topk
        reuse = routes >= 56 and routes * (routes - 1) >= 6 * experts
        direct = not reuse
    return Regime("w4a16", "direct" if direct else "packed", None, block_m)


def nvfp4(tokens: int, topk: int, experts: int, intermediate: int) -> Regime:
    """NVFP4 over native weights."""
    routes = tokens * topk
    if tokens <= SMALL_TOKENS and routes < MICRO_ROUTES:
        return Regime("micro")
    if routes < 15 * experts:
        tile_m = 16
    elif routes < 48 * experts:
        tile_m = 32
    elif routes < 96 * experts:
        tile_m = 32 if intermediate % 128 else 64
    else:
        tile_m = 128
    direct = routes <= 32 and tile_m == 16
    return Regime("dynamic", "direct" if direct else "grouped", tile_m)


def _route_block(tokens: int, topk: int, experts: int) -> int:
    for block in (8, 16, 32, 48, 64):
        if tokens * topk / experts < 0.9 * block:
            return block
    return 64
