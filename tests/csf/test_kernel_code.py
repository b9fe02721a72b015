# SPDX-License-Identifier: Apache-2.0
"""What Triton makes of the expansion, compiled without a GPU: the accesses that its speed rests on.

A change that is right and slow shows nowhere else on a CPU: with neighbouring threads on neighbouring chunks the kernel
took three times as long and wrote the same bytes.
"""

from __future__ import annotations

import re
import warnings

import pytest
from nvfp4_csf import expand_kernels, expansion
from nvfp4_csf.planes import PlaneGeometry

triton = pytest.importorskip("triton", reason="Triton is not installed")

# GLM-5.3-Flash TP1 and TP8, and Qwen3.8-Flash (columns that are not a power of two).
GEOMETRIES = [
    ((288, 4096, 256), (288, 4096, 128)),
    ((288, 512, 256), (288, 4096, 16)),
    ((512, 1280, 160), (512, 2560, 40)),
]


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("shapes", GEOMETRIES)
def test_expansion_uses_16_byte_accesses_and_no_shared_memory(shapes, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = expansion.constants(*(PlaneGeometry(*shape) for shape in shapes))
    names = expand_kernels.expand_all.arg_names
    tensors = names[: len(names) - len(constants)]
    types = {
        name: "*i32" if name.startswith(("exceptions", "offsets")) else "*u32" for name in tensors
    }
    source = ASTSource(
        expand_kernels.expand_all,
        {**types, **dict.fromkeys(names[len(tensors) :], "constexpr")},
        {(len(tensors) + index,): value for index, value in enumerate(constants)},
        {(index,): [["tt.divisibility", 16]] for index in range(len(tensors))},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": expansion.WARPS}
        )
    assert kernel.metadata.shared == 0
    assert "convert_layout" not in kernel.asm["ttgir"]
    [order] = set(
        re.findall(r"sizePerThread = \[1, 4\], threadsPerWarp = \[(\d+), 1\]", kernel.asm["ttgir"])
    )
    assert order == "32", "the lanes of a warp must hold neighbouring words"
    ptx = kernel.asm["ptx"]
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", ptx)
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", ptx)
    # Single words are never stored; a step of half the usual size (40 columns) stores pairs.
    assert not re.search(r"st\.global(?!\S*\.v[24])\S*\.b32", ptx)
