# SPDX-License-Identifier: Apache-2.0
"""Number formats of NVFP4 in plain torch: E2M1 codes, E4M3 block scales, the F8_128x4 order, quantisation.

Products of E2M1 and E4M3 values with bf16 activations have few significant bits, and sums over a row are taken in
float64, where they are exact for the magnitudes of the tests. So the order of a sum, and with it the number of rows
computed together, cannot change a result.
"""

from __future__ import annotations

from itertools import pairwise

import torch

BLOCK = 16
"""Elements per block scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``[..., K/2]``, low nibble first, to float64 ``[..., K]``."""
    table = torch.tensor(
        [*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=packed.device
    )
    packed = packed.view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1)
    return table[nibbles.long()].flatten(-2)


def round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, ties to the even code, saturating at 6."""
    magnitude = values.abs()
    middles = torch.tensor(
        [(low + high) / 2 for low, high in pairwise(E2M1)], dtype=values.dtype, device=values.device
    )
    code = torch.bucketize(magnitude, middles)
    # bucketize keeps a tie at the lower code; an odd lower code rounds up to the even one.
    tie = (code < len(middles)) & (magnitude == middles[code.clamp(max=len(middles) - 1)])
    code = code + (tie & (code % 2 == 1))
    table = torch.tensor(E2M1, dtype=values.dtype, device=values.device)
    return torch.copysign(table[code], values)


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value, saturating at 448."""
    clamped = values.clamp(max=E4M3_MAX).to(torch.float32)
    return clamped.to(torch.float8_e4m3fn).to(torch.float64)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """*x* ``[..., K]`` as NVFP4 keeps it: E2M1 times E4M3 block scale, still multiplied by *global_scale*.

    Block scale = E4M3(global_scale * amax / 6); *global_scale* broadcasts over ``[..., 1]``.
    """
    blocks = x.to(torch.float64).unflatten(-1, (-1, BLOCK))
    scaled = blocks * global_scale[..., None].to(torch.float64)
    block_scale = round_e4m3(scaled.abs().amax(dim=-1, keepdim=True) / E2M1_MAX)
    quotient = torch.where(block_scale > 0, scaled / block_scale, torch.zeros_like(scaled))
    return (round_e2m1(quotient) * block_scale).flatten(-2)


def unswizzle(scales: torch.Tensor, experts: int, rows: int, blocks: int) -> torch.Tensor:
    """Block scales in F8_128x4 order to float64 ``[experts, rows, blocks]``.

    Byte ``((r // 128) * (Cp // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4`` of an expert
    holds row r, block c; Cp is *blocks* rounded up to 4, rows are padded to 128.
    """
    padded_rows, padded_blocks = -(-rows // 128) * 128, -(-blocks // 4) * 4
    tiles = scales.view(torch.float8_e4m3fn).to(torch.float64)
    tiles = tiles.reshape(experts, padded_rows // 128, padded_blocks // 4, 32, 4, 4)
    plain = tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, padded_rows, padded_blocks)
    return plain[:, :rows, :blocks]


def dequantize(packed: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """FP4 ``[E, rows, K/2]`` times plain block scales ``[E, rows, K/16]``, float64, without the global scale."""
    return decode_e2m1(packed) * block_scales.repeat_interleave(BLOCK, dim=-1)


def silu_gated(up: torch.Tensor, gate: torch.Tensor, limit: float | None) -> torch.Tensor:
    """``silu(gate) * up`` as bf16 holds it; *limit* clamps the gate from above and up from both sides."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).to(torch.float64)


def swizzle(plain: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`unswizzle`: ``[E, rows, blocks]`` to E4M3 bytes ``[E, padded rows, padded blocks]``."""
    experts, rows, blocks = plain.shape
    padded_rows, padded_blocks = -(-rows // 128) * 128, -(-blocks // 4) * 4
    padded = torch.zeros(
        experts, padded_rows, padded_blocks, dtype=torch.float32, device=plain.device
    )
    padded[:, :rows, :blocks] = plain
    tiles = padded.reshape(experts, padded_rows // 128, 4, 32, padded_blocks // 4, 4)
    order = tiles.permute(0, 1, 4, 3, 2, 5).contiguous()
    return order.view(experts, padded_rows, padded_blocks).to(torch.float8_e4m3fn)
