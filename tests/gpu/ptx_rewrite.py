# SPDX-License-Identifier: Apache-2.0
"""Rewrites the SM120 instructions in b12x's inline PTX into sequences that SM90 has, with the same results.

Text in, text out; no GPU and no CuTe DSL needed. Conversions give the same bits. The block-scaled NVFP4 MMA multiplies
exact f16 products (E2M1 times an E4M3 scale needs five bits of significand) and differs from the instruction only in
the order in which FP32 sums are formed.

Formats, least significant element first: E2M1 codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign in bit 3, two to
a byte. Register layouts of the MMA are those that b12x documents in ``_lib/intrinsics.py``
(``nvfp4_mma_m16n8k64_f32_e2m1``).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

HITS: Counter[str] = Counter()
"""How often each instruction has been rewritten in this process."""

_numbers = itertools.count()

# Bytes of the eight E2M1 magnitudes as f16 and bf16, as the two operands of a byte permutation: entry i is byte i.
F16_HIGH = (0x3E3C3800, 0x46444240)
BF16_HIGH = (0x3F3F3F00, 0x40404040)
BF16_LOW = (0xC0800000, 0xC0804000)


class _Block:
    """Instructions of one replacement, with registers whose names no other replacement uses."""

    def __init__(self) -> None:
        self._prefix = f"sm90_{next(_numbers)}_"
        self._declared: list[str] = []
        self._lines: list[str] = []

    def new(self, kind: str, count: int = 1) -> list[str]:
        names = [f"{self._prefix}{len(self._declared) + i}" for i in range(count)]
        self._declared += [f".reg .{kind} {name};" for name in names]
        return names

    def one(self, kind: str = "b32") -> str:
        return self.new(kind)[0]

    def add(self, *instructions: str) -> None:
        self._lines += [f"{instruction};" for instruction in instructions]

    def __str__(self) -> str:
        return "{ " + " ".join(self._declared + self._lines) + " }"


def _table(block: _Block, target: str, selector: str, table: tuple[int, int]) -> None:
    block.add(f"prmt.b32 {target}, {table[0]:#x}, {table[1]:#x}, {selector}")


def _e2m1_pair(block: _Block, target: str, code: str, *, bf16: bool) -> None:
    """*target* := the two E2M1 codes in the low byte of b32 *code* as two 16-bit floats."""
    low, high, selector, sign, part = block.new("b32", 5)
    block.add(
        # Selector nibbles 1 and 3 pick the upper byte of either float; nibble value 0 picks a zero byte.
        f"and.b32 {low}, {code}, 0x07",
        f"shl.b32 {low}, {low}, 4",
        f"and.b32 {high}, {code}, 0x70",
        f"shl.b32 {high}, {high}, 8",
        f"or.b32 {selector}, {low}, {high}",
        f"and.b32 {low}, {code}, 0x08",
        f"shl.b32 {low}, {low}, 12",
        f"and.b32 {high}, {code}, 0x80",
        f"shl.b32 {high}, {high}, 24",
        f"or.b32 {sign}, {low}, {high}",
    )
    _table(block, part, selector, BF16_HIGH if bf16 else F16_HIGH)
    block.add(f"or.b32 {sign}, {sign}, {part}")
    if bf16:
        block.add(f"shr.u32 {selector}, {selector}, 4")
        _table(block, part, selector, BF16_LOW)
        block.add(f"or.b32 {sign}, {sign}, {part}")
    block.add(f"mov.b32 {target}, {sign}")


def _from_e2m1(match: re.Match[str]) -> str:
    block = _Block()
    code = block.one()
    block.add(f"cvt.u32.u8 {code}, {match['source']}")
    _e2m1_pair(block, match["target"], code, bf16=match["float"] == "bf16")
    return str(block)


def _from_e4m3(match: re.Match[str]) -> str:
    block = _Block()
    pair = block.one()
    halves, floats = block.new("b16", 2), block.new("f32", 2)
    block.add(
        f"cvt.rn.f16x2.e4m3x2 {pair}, {match['source']}",
        f"mov.b32 {{{halves[0]}, {halves[1]}}}, {pair}",
        *(f"cvt.f32.f16 {wide}, {half}" for wide, half in zip(floats, halves, strict=True)),
        f"cvt.rn.bf16x2.f32 {match['target']}, {floats[1]}, {floats[0]}",
    )
    return str(block)


def _from_ue8m0(match: re.Match[str]) -> str:
    """2^(e - 127): the exponent field as it is; e = 0 is the subnormal 2^-127, e = 255 is NaN."""
    block = _Block()
    both, result, piece = block.new("b32", 3)
    nan = block.one("pred")
    block.add(f"cvt.u32.u16 {both}, {match['source']}", f"mov.b32 {result}, 0")
    for position in (0, 1):
        block.add(
            f"bfe.u32 {piece}, {both}, {8 * position}, 8",
            f"setp.eq.u32 {nan}, {piece}, 255",
            f"shl.b32 {piece}, {piece}, 7",
            f"max.u32 {piece}, {piece}, 0x40",
            f"selp.b32 {piece}, 0x7fff, {piece}, {nan}",
            f"shl.b32 {piece}, {piece}, {16 * position}",
            f"or.b32 {result}, {result}, {piece}",
        )
    block.add(f"mov.b32 {match['target']}, {result}")
    return str(block)


def _to_e2m1(match: re.Match[str]) -> str:
    """Nearest, ties to even, saturating: spacing is 0.5 below 2, 1 below 4, 2 above, so an integer rounding does it."""
    block = _Block()
    code, result, sign, offset = block.new("b32", 4)
    size, scale = block.new("f32", 2)
    below = block.one("pred")
    block.add(f"mov.b32 {result}, 0")
    for source in (match["upper"], match["lower"]):
        block.add(
            f"abs.f32 {size}, {source}",
            f"min.f32 {size}, {size}, 0f40C00000",  # 6
            f"setp.lt.f32 {below}, {size}, 0f40800000",  # 4
            f"selp.f32 {scale}, 0f3F800000, 0f3F000000, {below}",
            f"selp.b32 {offset}, 2, 4, {below}",
            f"setp.lt.f32 {below}, {size}, 0f40000000",  # 2
            f"selp.f32 {scale}, 0f40000000, {scale}, {below}",
            f"selp.b32 {offset}, 0, {offset}, {below}",
            f"mul.f32 {size}, {size}, {scale}",
            f"cvt.rni.u32.f32 {code}, {size}",
            f"add.u32 {code}, {code}, {offset}",
            f"mov.b32 {sign}, {source}",
            f"shr.u32 {sign}, {sign}, 28",
            f"and.b32 {sign}, {sign}, 8",
            f"or.b32 {code}, {code}, {sign}",
            f"shl.b32 {result}, {result}, 4",
            f"or.b32 {result}, {result}, {code}",
        )
    block.add(f"cvt.u8.u32 {match['target']}, {result}")
    return str(block)


def _to_e4m3(match: re.Match[str]) -> str:
    block = _Block()
    pair = block.one()
    bits, floats = block.new("b32", 2), block.new("f32", 2)
    block.add(
        f"mov.b32 {pair}, {match['source']}",
        f"shl.b32 {bits[0]}, {pair}, 16",
        f"and.b32 {bits[1]}, {pair}, 0xffff0000",
        *(f"mov.b32 {wide}, {word}" for wide, word in zip(floats, bits, strict=True)),
        f"cvt.rn.satfinite.e4m3x2.f32 {match['target']}, {floats[1]}, {floats[0]}",
    )
    return str(block)


def _block_scaled_mma(match: re.Match[str]) -> str:
    """m16n8k64 as four m16n8k16 in f16.

    A sum over k may be formed in any order, so instruction y takes byte y of every register: in A and in B alike the
    same eight of the 64 values of k.
    """
    d, a, b, c = (_operands(match[name]) for name in "dabc")
    block = _Block()
    lane, source, shift, byte = block.new("b32", 4)
    half = block.one("b16")
    rows, column = block.new("b32", 2), block.one()
    block.add(f"mov.u32 {lane}, %laneid", f"and.b32 {source}, {lane}, 28")
    # Scale words of rows q and q + 8 ride lanes 4q and 4q + 1, that of column q rides lane 4q.
    shuffle = "shfl.sync.idx.b32 {}, {}, {}, 31, 0xffffffff"
    block.add(
        shuffle.format(rows[0], match["sfa"], source), shuffle.format(column, match["sfb"], source)
    )
    block.add(f"or.b32 {source}, {source}, 1", shuffle.format(rows[1], match["sfa"], source))
    # A register covers eight values of k from 8 (lane % 4), plus 32 in the upper registers: blocks of 16 share a scale.
    block.add(f"and.b32 {shift}, {lane}, 2", f"shl.b32 {shift}, {shift}, 2")

    def factor(word: str, upper: int) -> str:
        scale = block.one()
        block.add(
            f"shr.u32 {byte}, {word}, {shift}",
            f"bfe.u32 {byte}, {byte}, {16 * upper}, 7",
            f"mul.lo.u32 {byte}, {byte}, 0x101",
            f"cvt.u16.u32 {half}, {byte}",
            f"cvt.rn.f16x2.e4m3x2 {scale}, {half}",
        )
        return scale

    a_scales = [factor(rows[register % 2], register // 2) for register in range(4)]
    b_scales = [factor(column, register) for register in range(2)]
    sums = block.new("f32", 4)
    block.add(*(f"mov.f32 {s}, {value}" for s, value in zip(sums, c, strict=True)))
    for y in range(4):
        factors = []
        for register, scale in zip([*a, *b], [*a_scales, *b_scales], strict=True):
            value = block.one()
            block.add(f"bfe.u32 {byte}, {register}, {8 * y}, 8")
            _e2m1_pair(block, value, byte, bf16=False)
            block.add(f"mul.f16x2 {value}, {value}, {scale}")
            factors.append(value)
        total = ", ".join(sums)
        block.add(
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{total}}}, "
            f"{{{', '.join(factors[:4])}}}, {{{', '.join(factors[4:])}}}, {{{total}}}"
        )
    block.add(*(f"mov.f32 {target}, {s}" for target, s in zip(d, sums, strict=True)))
    return str(block)


def _operands(text: str) -> list[str]:
    return [operand.strip() for operand in text.split(",")]


def _conversion(name: str, *operands: str) -> str:
    return (
        name.replace(".", r"\.")
        + r"\s+"
        + r"\s*,\s*".join(rf"(?P<{o}>[^\s,;{{}}]+)" for o in operands)
        + r"\s*;"
    )


def _list(name: str) -> str:
    return rf"\{{(?P<{name}>[^}}]*)\}}"


_MMA = (
    r"mma\.sync\.aligned\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.m16n8k64\.row\.col"
    r"\.f32\.e2m1\.e2m1\.f32\.ue4m3\s*"
    + r"\s*,\s*".join(
        [*(_list(name) for name in "dabc"), r"\{\s*(?P<sfa>[^}\s]*)\s*\}", r"\{[^}]*\}", r"\{\s*(?P<sfb>[^}\s]*)\s*\}", r"\{[^}]*\}"]
    )
    + r"\s*;"
)  # fmt: skip

RULES: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = {
    "e2m1x2 to f16x2 or bf16x2": (
        re.compile(_conversion(r"cvt.rn.(?P<float>b?f16)x2.e2m1x2", "target", "source")), _from_e2m1
    ),
    "e4m3x2 to bf16x2": (re.compile(_conversion("cvt.rn.bf16x2.e4m3x2", "target", "source")), _from_e4m3),
    "ue8m0x2 to bf16x2": (re.compile(_conversion("cvt.rn.bf16x2.ue8m0x2", "target", "source")), _from_ue8m0),
    "f32 to e2m1x2": (
        re.compile(_conversion("cvt.rn.satfinite.e2m1x2.f32", "target", "upper", "lower")), _to_e2m1
    ),
    "bf16x2 to e4m3x2": (re.compile(_conversion("cvt.rn.satfinite.e4m3x2.bf16x2", "target", "source")), _to_e4m3),
    "block-scaled NVFP4 MMA": (re.compile(_MMA), _block_scaled_mma),
}  # fmt: skip


def rewrite(ptx: str) -> str:
    """*ptx* with every known SM120 instruction replaced; anything else is returned as it is."""
    for name, (pattern, replacement) in RULES.items():
        ptx, count = pattern.subn(replacement, ptx)
        if count:
            HITS[name] += count
    return ptx


def unknown(ptx: str) -> Iterator[str]:
    """Instructions in *ptx* that SM90 lacks and no rule covers."""
    for match in re.finditer(
        r"\b(?:cvt|mma|ldmatrix)[\w.:]*(?:e2m1|e3m2|e2m3|ue8m0|m16n16)[\w.:]*", ptx
    ):
        yield match[0]
