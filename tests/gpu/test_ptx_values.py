# SPDX-License-Identifier: Apache-2.0
"""Values of the PTX rewrites on a GPU: conversions for every input, the block-scaled MMA on random fragments."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gpu.ptx_rewrite import rewrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out, .param .u32 n)
{
  .reg .b8 b0; .reg .b16 h0; .reg .b32 r<10>; .reg .f32 f<4>; .reg .b64 d<4>; .reg .pred p;
  ld.param.u64 d0, [in]; ld.param.u64 d1, [out]; ld.param.u32 r9, [n];
  mov.u32 r0, %ctaid.x; mov.u32 r1, %ntid.x; mov.u32 r2, %tid.x; mad.lo.u32 r8, r0, r1, r2;
  setp.ge.u32 p, r8, r9; @p ret;
"""
TAIL = "ret; }"
WORD = "mul.wide.u32 d2, r8, 4; add.u64 d3, d0, d2; add.u64 d1, d1, d2; ld.global.u32 r0, [d3];"
STORE = "st.global.u32 [d1], r1;"
TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def launch(
    body: str, source: torch.Tensor, target: torch.Tensor, count: int, block: int = 256
) -> None:
    """Run *body* with one thread per element, through the driver: nothing but PTX is involved."""
    from cuda.bindings import driver

    def checked(result: tuple) -> object:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    module = checked(driver.cuModuleLoadData((HEAD + rewrite(body) + TAIL).encode()))
    kernel = checked(driver.cuModuleGetFunction(module, b"k"))
    values = (source.data_ptr(), target.data_ptr(), count)
    types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
    grid = -(-count // block)
    checked(driver.cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, 0, 0, (values, types), 0))
    torch.cuda.synchronize()


def mapped(body: str, words: torch.Tensor) -> torch.Tensor:
    source = words.to(torch.int32).cuda()
    target = torch.full_like(source, -1)
    launch(WORD + body + STORE, source, target, source.numel())
    return target.cpu()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal values, signs of zero included; NaN equals NaN."""
    nan = found.isnan() & wanted.isnan()
    return bool((nan | ((found == wanted) & (found.signbit() == wanted.signbit()))).all())


@pytest.mark.parametrize(("kind", "dtype"), [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
def test_every_pair_of_e2m1_codes(kind: str, dtype: torch.dtype) -> None:
    words = torch.arange(256)
    found = (
        mapped(f"cvt.u8.u32 b0, r0; cvt.rn.{kind}.e2m1x2 r1, b0;", words)
        .view(dtype)
        .view(-1, 2)
        .float()
    )
    assert same(found, torch.stack((TABLE[words & 15], TABLE[words >> 4]), -1))


def test_every_pair_of_e4m3_codes() -> None:
    words = torch.arange(65536)
    found = (
        mapped("cvt.u16.u32 h0, r0; cvt.rn.bf16x2.e4m3x2 r1, h0;", words)
        .view(torch.bfloat16)
        .view(-1, 2)
    )
    wanted = torch.stack((words & 255, words >> 8), -1).to(torch.uint8).view(torch.float8_e4m3fn)
    assert same(found.float(), wanted.float())


def test_every_pair_of_ue8m0_codes() -> None:
    words = torch.arange(65536)
    found = (
        mapped("cvt.u16.u32 h0, r0; cvt.rn.bf16x2.ue8m0x2 r1, h0;", words)
        .view(torch.bfloat16)
        .view(-1, 2)
    )
    exponents = torch.stack((words & 255, words >> 8), -1)
    wanted = torch.where(
        exponents == 255, float("nan"), torch.exp2(exponents.double() - 127)
    ).float()
    assert same(found.float(), wanted)


def test_every_pair_of_bf16_values_to_e4m3() -> None:
    bits = torch.arange(65536, dtype=torch.int32)
    values = torch.stack((bits, bits.flip(0)), -1).to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan().any(-1)]
    found = mapped(
        "cvt.rn.satfinite.e4m3x2.bf16x2 h0, r0; cvt.u32.u16 r1, h0;",
        values.contiguous().view(torch.int32).view(-1),
    )
    wanted = values.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    assert torch.equal(torch.stack((found & 255, found >> 8), -1), wanted)


def test_f32_to_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    grid = TABLE[:8].double()
    middle = (grid[1:] + grid[:-1]) / 2
    f32 = torch.float32
    up, down = (torch.nextafter(middle.to(f32), torch.tensor(edge)) for edge in (9.0, -9.0))
    size = torch.cat(
        (middle.to(f32), up, down, grid.to(f32), torch.tensor([1e-30, 1e30, 5.5, 7.0]))
    )
    x = torch.cat((size, -size, torch.randn(100_000) * 3, torch.linspace(-8, 8, 65_537)))
    x = x[: x.numel() // 2 * 2].view(-1, 2)
    source = x.contiguous().cuda()
    target = torch.full((x.shape[0],), -1, dtype=torch.int32, device="cuda")
    body = """mul.wide.u32 d2, r8, 8; add.u64 d3, d0, d2; ld.global.v2.f32 {f0, f1}, [d3];
        cvt.rn.satfinite.e2m1x2.f32 b0, f1, f0; cvt.u32.u8 r1, b0;
        mul.wide.u32 d2, r8, 4; add.u64 d1, d1, d2; st.global.u32 [d1], r1;"""
    launch(body, source, target, x.shape[0])
    found = torch.stack((target & 15, target >> 4), -1).cpu()
    a = x.abs().double()
    below, above = torch.searchsorted(middle, a), torch.searchsorted(middle, a, right=True)
    code = torch.where(below % 2 == 0, below, above)  # they differ at a tie only
    assert torch.equal(found, code.int() | x.signbit().int() << 3)


def test_block_scaled_mma_on_random_fragments() -> None:
    generator = torch.Generator().manual_seed(0)
    count = 256

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, (count, *shape), generator=generator)

    a, b = draw(16, 16, 64), draw(16, 8, 64)
    a_scales, b_scales = draw(127, 16, 4), draw(127, 8, 4)
    c = torch.randn(count, 16, 8, generator=generator)

    def factors(scales: torch.Tensor) -> torch.Tensor:
        return scales.to(torch.uint8).view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)

    table = TABLE.double()
    wanted = (table[a] * factors(a_scales)) @ (table[b] * factors(b_scales)).transpose(
        1, 2
    ) + c.double()

    def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
        word = (values.long() << bits * torch.arange(values.shape[-1])).sum(-1)
        return torch.where(word >= 1 << 31, word - (1 << 32), word).int()

    words = torch.zeros(count, 32, 12, dtype=torch.int32)
    for lane in range(32):
        q, p = divmod(lane, 4)
        for register in range(4):
            k = 32 * (register // 2) + 8 * p
            words[:, lane, register] = packed(a[:, q + 8 * (register % 2), k : k + 8], 4)
        for register in range(2):
            k = 32 * register + 8 * p
            words[:, lane, 4 + register] = packed(b[:, q, k : k + 8], 4)
        # Lanes 2 and 3 of a group carry no row scales: a value there must have no effect.
        words[:, lane, 6] = packed(a_scales[:, q + 8 * p], 8) if p < 2 else 0x7E7E7E7E
        words[:, lane, 7] = packed(b_scales[:, q], 8)
        rows = torch.stack(
            (c[:, q, 2 * p], c[:, q, 2 * p + 1], c[:, q + 8, 2 * p], c[:, q + 8, 2 * p + 1]), -1
        )
        words[:, lane, 8:] = rows.contiguous().view(torch.int32)
    source = words.cuda()
    target = torch.full((count, 32, 4), float("nan"), device="cuda")
    body = """mul.wide.u32 d2, r8, 48; add.u64 d3, d0, d2;
        ld.global.v4.b32 {r0, r1, r2, r3}, [d3]; ld.global.v4.b32 {r4, r5, r6, r7}, [d3+16];
        ld.global.v4.f32 {f0, f1, f2, f3}, [d3+32];
        mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3
        {f0, f1, f2, f3}, {r0, r1, r2, r3}, {r4, r5}, {f0, f1, f2, f3}, {r6}, {h0, h0}, {r7}, {h0, h0};
        mul.wide.u32 d2, r8, 16; add.u64 d1, d1, d2; st.global.v4.f32 [d1], {f0, f1, f2, f3};"""
    launch(body, source, target, count * 32, block=32)
    found = torch.zeros(count, 16, 8, dtype=torch.float64)
    values = target.cpu().double()
    for lane in range(32):
        q, p = divmod(lane, 4)
        for index, (row, column) in enumerate(
            ((q, 2 * p), (q, 2 * p + 1), (q + 8, 2 * p), (q + 8, 2 * p + 1))
        ):
            found[:, row, column] = values[:, lane, index]
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
