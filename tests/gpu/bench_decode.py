# SPDX-License-Identifier: Apache-2.0
"""MoE decode calls in a CUDA graph: packed W4A16, native W4A16 (dual plan), and native over an expanded scratch.

GLM-5.3-Flash TP2 size on the real b12x kernels. On SM90 the native kernels' FP4 conversions are emulated (`gpu.sm90`):
the table shows what expansion adds, and does not bound the native kernel's speed on SM120.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import torch
from nvfp4_csf.encoder import encode
from nvfp4_csf.expansion import LayerExpansion

from gpu import moe
from gpu.timing import device_time, versions

CALLS = 8
"""MoE calls per graph, each with other routed experts."""


def decode(rows: tuple[int, ...] = (1, 8, 64)) -> None:
    size = moe.GLM_TP2
    weights = moe.random_weights(size, 0)
    planes = encode(weights.scales13), encode(weights.scales2)
    shapes = (weights.scales13.shape, weights.scales2.shape)
    scratch = tuple(
        torch.zeros(s, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn) for s in shapes
    )
    expansion = LayerExpansion(*planes, *scratch)
    packed = moe.prepare(weights, modes="w4a16")
    dual = moe.prepare(weights)
    csf = moe.prepare(weights, scratch=scratch)
    print(f"# MoE decode call in a CUDA graph, W4A16, {size}. {versions()}")
    for count in rows:
        calls = [moe.random_call(size, count, seed) for seed in range(CALLS)]
        outputs = torch.empty((3, CALLS, count, size.hidden), dtype=torch.bfloat16, device="cuda")

        def run(
            prepared: moe.Prepared,
            out: torch.Tensor,
            before: Callable | None = None,
            calls: list = calls,
        ) -> None:
            for call, target in zip(calls, out, strict=True):
                if before is not None:
                    before(call.ids)
                prepared.run("w4a16", call, target)

        variants = {
            name: _graph(partial(run, prepared, out, before))
            for name, prepared, out, before in (
                ("packed", packed, outputs[0], None),
                ("dual", dual, outputs[1], None),
                ("dual + CSF", csf, outputs[2], expansion.expand_routed),
            )
        }
        times = device_time({name: graph.replay for name, graph in variants.items()}, calls=5)
        equal = torch.equal(outputs[1], outputs[2])
        largest = float(
            (outputs[0].float() - outputs[1].float()).abs().max() / outputs[0].float().abs().max()
        )
        print(
            f"{count:3d} rows  "
            + "  ".join(f"{name} {_per_call(spread)} us" for name, spread in times.items())
            + f"  dual and CSF bit-equal: {equal}; packed differs by {largest:.1e} of the largest output",
            flush=True,
        )


def _per_call(spread: object) -> str:
    return f"{spread.median / CALLS:7.1f} [{spread.low / CALLS:.1f}, {spread.high / CALLS:.1f}]"


def _graph(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


COMMANDS = {"decode": decode}
