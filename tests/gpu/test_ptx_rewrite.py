# SPDX-License-Identifier: Apache-2.0
"""The PTX rewrite: every replacement assembles for SM90; on a GPU, every value is right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpu import ptx_rewrite as rw

MMA = """
mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3
{f0, f1, f2, f3}, {r0, r1, r2, r3}, {r4, r5}, {f0, f1, f2, f3}, {r6}, {h0, h1}, {r7}, {h0, h1};
"""
INSTRUCTIONS = {
    "e2m1x2 to f16x2 or bf16x2": "cvt.rn.f16x2.e2m1x2 r0, b0; cvt.rn.bf16x2.e2m1x2 r1, b0;",
    "e4m3x2 to bf16x2": "cvt.rn.bf16x2.e4m3x2 r0, h0;",
    "ue8m0x2 to bf16x2": "cvt.rn.bf16x2.ue8m0x2 r0, h0;",
    "f32 to e2m1x2": "cvt.rn.satfinite.e2m1x2.f32 b0, f0, f1;",
    "bf16x2 to e4m3x2": "cvt.rn.satfinite.e4m3x2.bf16x2 h0, r0;",
    "block-scaled NVFP4 MMA": MMA,
}
KERNEL = """
.version 8.4
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p)
{{
  .reg .b8 b0; .reg .b16 h<2>; .reg .b32 r<8>; .reg .f32 f<4>; .reg .b64 d0;
  ld.param.u64 d0, [p];
  ld.global.v4.b32 {{r0, r1, r2, r3}}, [d0]; ld.global.v4.b32 {{r4, r5, r6, r7}}, [d0+16];
  ld.global.v4.f32 {{f0, f1, f2, f3}}, [d0+32]; ld.global.u16 h0, [d0+48]; ld.global.u16 h1, [d0+50];
  ld.global.u8 b0, [d0+52];
  {body}
  st.global.v4.b32 [d0], {{r0, r1, r2, r3}}; st.global.v4.f32 [d0+32], {{f0, f1, f2, f3}};
  st.global.u16 [d0+48], h0; st.global.u8 [d0+52], b0;
  ret;
}}
"""


def ptxas() -> str:
    found = shutil.which("ptxas")
    if found is None:
        triton = pytest.importorskip(
            "triton", reason="neither ptxas nor Triton, which brings it, is installed"
        )
        found = str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")
    return found


def assemble(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "k.ptx"
    source.write_text(KERNEL.format(body=body))
    command = [ptxas(), "-arch=sm_90a", str(source), "-o", str(folder / "k.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_there_is_an_instruction_for_every_rule() -> None:
    assert set(INSTRUCTIONS) == set(rw.RULES)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_replacements_assemble_for_sm90_and_the_originals_do_not(name: str, tmp_path: Path) -> None:
    before = rw.HITS[name]
    body = rw.rewrite(INSTRUCTIONS[name])
    assert rw.HITS[name] > before
    assert not list(rw.unknown(body))
    result = assemble(body, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert assemble(INSTRUCTIONS[name], tmp_path).returncode != 0


def test_registers_of_two_replacements_differ() -> None:
    twice = rw.rewrite(INSTRUCTIONS["f32 to e2m1x2"] * 2)
    declared = [word for word in twice.split() if word.startswith("sm90_") and word.endswith(";")]
    registers = [part.split()[-1] for part in twice.split(";") if ".reg" in part]
    assert declared
    assert len(registers) == len(set(registers))


def test_other_instructions_stay_as_they_are() -> None:
    text = "cvt.rn.f16x2.e4m3x2 $0, h; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {a}, {b}, {c}, {d};"
    assert rw.rewrite(text) == text


def test_instructions_without_a_rule_are_named() -> None:
    text = "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e2m1.f32.ue8m0 {};"
    assert list(rw.unknown(rw.rewrite(text)))
    assert not list(rw.unknown("cvt.rn.f16x2.e4m3x2 $0, h;"))


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def permuted(table: tuple[int, int], selector: int) -> int:
    """prmt.b32 of *table* as the CUDA manual describes it (no sign replication: selector nibbles are below 8)."""
    entries = (table[1] << 32 | table[0]).to_bytes(8, "little")
    return int.from_bytes(bytes(entries[selector >> 4 * i & 7] for i in range(4)), "little")


@pytest.mark.parametrize("code", range(8))
def test_tables_hold_the_values_of_e2m1(code: int) -> None:
    torch = pytest.importorskip("torch")
    selector = code << 4
    f16 = torch.tensor([permuted(rw.F16_HIGH, selector)], dtype=torch.int32).view(torch.float16)
    assert float(f16[0]) == E2M1[code]
    bits = permuted(rw.BF16_HIGH, selector) | permuted(rw.BF16_LOW, selector >> 4)
    assert float(torch.tensor([bits], dtype=torch.int32).view(torch.bfloat16)[0]) == E2M1[code]
