# SPDX-License-Identifier: Apache-2.0
"""Lets b12x's SM120 kernels compile and run on SM90, for tests.

:func:`install` changes functions of the CuTe DSL in this process, before the first kernel is compiled; no file of b12x
or the DSL is touched:

* inline PTX goes through :mod:`gpu.ptx_rewrite`;
* ``cute.gemm`` on the block-scaled NVFP4 MMA goes through b12x's own inline-PTX form of that instruction, and so through
  the rewrite, too;
* TMA descriptors of 4-bit tensors describe 16-bit words, since SM90's copy engine has no 4-bit format.

The results are those of SM120 up to the order of FP32 sums; the speed says nothing about SM120. Compiled kernels must not
be mixed with others (b12x's cache key does not know of the rewrite), so a cache folder of its own is set.
Compilation must stay in this process: do not give a preparation session worker processes.

Not covered: the FP8/FP6 MMAs (``mxf8f6f4``), their conversions, and 8-bit ``ldmatrix``.
"""

from __future__ import annotations

import os
from typing import Any

from gpu.ptx_rewrite import rewrite

CACHE = "/tmp/b12x-sm90-cache"

_installed = False
_scales: dict[str, Any] = {}
"""Scale pointers that were last set on an NVFP4 MMA atom; b12x sets both right before each ``cute.gemm``."""


def install() -> None:
    """Make the changes, once, on a Hopper device (or without any, to compile for one). Elsewhere nothing is changed."""
    global _installed
    import torch

    if _installed or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9):
        return
    _installed = True
    os.environ["B12X_COMPILE_CACHE_DIR"] = CACHE
    _rewrite_inline_asm()
    _replace_block_scaled_gemm()
    _describe_fp4_as_words()
    _open_gates()


def _rewrite_inline_asm() -> None:
    from cutlass._mlir.dialects import llvm

    original = llvm.inline_asm

    def inline_asm(result: Any, operands: Any, text: Any, *rest: Any, **options: Any) -> Any:
        return original(
            result, operands, rewrite(text) if isinstance(text, str) else text, *rest, **options
        )

    llvm.inline_asm = inline_asm


def _replace_block_scaled_gemm() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.base_dsl.arch import Arch
    from cutlass.cute.nvgpu.warp import mma

    mma.MmaSM120BlockScaledOp.admissible_archs = [
        *mma.MmaSM120BlockScaledOp.admissible_archs,
        Arch.sm_90a,
    ]
    original_set = mma.MmaBlockScaledTrait.set
    original_gemm = cute.gemm

    def keep(self: Any, field: Any, value: Any, **where: Any) -> None:
        if isinstance(self, mma.MmaMXF4NVF4Trait):
            _scales["SFB" if field is mma.Field.SFB else "SFA"] = value
        else:
            original_set(self, field, value, **where)

    def first_word(pointer: Any) -> Any:
        words = cute.recast_ptr(pointer, dtype=cutlass.Uint32)
        return cute.make_tensor(words, cute.make_layout(1))[0]

    def gemm(atom: Any, d: Any, a: Any, b: Any, c: Any, **options: Any) -> None:
        if not isinstance(atom._trait, mma.MmaMXF4NVF4Trait):
            original_gemm(atom, d, a, b, c, **options)
            return
        from b12x._lib.intrinsics import nvfp4_mma_m16n8k64_f32_e2m1 as instruction

        a_words, b_words = (cute.recast_tensor(fragment, cutlass.Uint32) for fragment in (a, b))
        sums = instruction(
            *(c[i] for i in range(4)),
            *(a_words[i] for i in range(4)),
            *(b_words[i] for i in range(2)),
            first_word(_scales["SFA"]),
            first_word(_scales["SFB"]),
        )
        for i in range(4):
            d[i] = sums[i]

    mma.MmaBlockScaledTrait.set = keep
    cute.gemm = gemm


def _describe_fp4_as_words() -> None:
    import cutlass
    from cutlass.cute.nvgpu import cpasync

    original = cpasync.make_tiled_tma_atom

    def make_tiled_tma_atom(
        op: Any, tensor: Any, *rest: Any, internal_type: Any = None, **options: Any
    ) -> Any:
        if internal_type is None and tensor.element_type.width == 4:
            internal_type = cutlass.Int16
        return original(op, tensor, *rest, internal_type=internal_type, **options)

    cpasync.make_tiled_tma_atom = make_tiled_tma_atom


def _open_gates() -> None:
    """b12x answers "is this device supported" with no on SM90; plan, prepare, bind and run do not ask."""
    from b12x._lib import gating

    gating.is_b12x = lambda device=None: True
