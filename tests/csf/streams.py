# SPDX-License-Identifier: Apache-2.0
"""Shared by the CSF tests: golden vectors, made-up scales, and a codec written the slow and obvious way."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Golden:
    name: str
    scales: np.ndarray
    fixed: bytes
    exceptions: list[int]
    swizzled_sha256: str


def golden() -> list[Golden]:
    found = []
    for path in sorted(DATA.glob("*.json")):
        case = json.loads(path.read_text())
        scales = np.frombuffer(base64.b64decode(case["scales_b64"]), np.uint8)
        found.append(
            Golden(
                case["name"],
                scales.reshape(case["rows"], case["columns"]),
                base64.b64decode(case["fixed_b64"]),
                case["exceptions_u32"],
                case["swizzled_f8_128x4_sha256"],
            )
        )
    return found


def plausible_scales(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Scale bytes as trained experts have them: a narrow band, a few strays, some zeros."""
    rng = np.random.default_rng(seed)
    scales = np.clip(np.round(0x44 + rng.normal(0, 3.2, (rows, columns))), 0, 0x7E)
    scales[rng.random(scales.shape) < 0.001] = 0
    return scales.astype(np.uint8)


def slow_encode(scales: np.ndarray) -> tuple[bytes, list[int]]:
    """The format page's words turned into loops."""
    rows, columns = scales.shape
    fixed, exceptions = bytearray(), []
    for slab in range(0, rows, 16):
        bases, codes = bytearray(), bytearray()
        for row in range(slab, slab + 16):
            values = [int(v) for v in scales[row]]
            base = max(range(241), key=lambda b: (sum(b <= v <= b + 15 for v in values), -b))
            bases.append(base)
            nibbles = []
            for column, value in enumerate(values):
                inside = base <= value <= base + 15
                nibbles.append(value - base if inside else 0)
                if not inside:
                    exceptions.append(value << 24 | row * columns + column)
            codes += bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2], strict=True))
        fixed += bases + codes
    return bytes(fixed), exceptions


def swizzle(scales: np.ndarray) -> np.ndarray:
    """F8_128x4 order by the offset formula, zero padded to 128 rows and 4 columns."""
    rows, columns = scales.shape
    blocks = -(-columns // 4)
    out = np.zeros(-(-rows // 128) * 128 * blocks * 4, np.uint8)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    out[_offset(r, c, blocks)] = scales
    return out


def unswizzle(swizzled: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Back to row-major ``[rows, columns]`` (multiples of 128 and 4), by the same formula."""
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return swizzled.reshape(-1)[_offset(r, c, columns // 4)]


def _offset(r: np.ndarray, c: np.ndarray, blocks: int) -> np.ndarray:
    return ((r // 128) * blocks + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
