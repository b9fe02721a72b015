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
from gpu.timing import device_time, graph_of, versions

CALLS = 8
"""MoE calls per graph, each with other routed experts."""


def native(rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> None:
    """Packed beside native only, at more sizes."""
    size = moe.GLM_TP2
    weights = moe.random_weights(size, 0)
    prepared = {
        "packed": moe.prepare(weights, modes="w4a16"),
        "native": moe.prepare(weights),
    }
    print(f"# W4A16 MoE decode call in a CUDA graph, {size}. {versions()}")
    for count in rows:
        calls = [moe.random_call(size, count, seed) for seed in range(CALLS)]
        outputs = {
            name: torch.empty((CALLS, count, size.hidden), dtype=torch.bfloat16, device="cuda")
            for name in prepared
        }

        def run(name: str, calls: list = calls, outputs: dict = outputs) -> None:
            for call, target in zip(calls, outputs[name], strict=True):
                prepared[name].run("w4a16", call, target)

        graphs = {name: graph_of(partial(run, name)) for name in prepared}
        times = device_time({name: graph.replay for name, graph in graphs.items()}, calls=5)
        print(
            f"{count:3d} rows  "
            + "  ".join(f"{name} {_per_call(spread)} us" for name, spread in times.items())
            + f"  largest difference {_difference(outputs['packed'], outputs['native']):.1e} of the largest output",
            flush=True,
        )


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
            name: graph_of(partial(run, prepared, out, before))
            for name, prepared, out, before in (
                ("packed", packed, outputs[0], None),
                ("dual", dual, outputs[1], None),
                ("dual + CSF", csf, outputs[2], expansion.expand_routed),
            )
        }
        times = device_time({name: graph.replay for name, graph in variants.items()}, calls=5)
        equal = torch.equal(outputs[1], outputs[2])
        largest = _difference(outputs[0], outputs[1])
        print(
            f"{count:3d} rows  "
            + "  ".join(f"{name} {_per_call(spread)} us" for name, spread in times.items())
            + f"  dual and CSF bit-equal: {equal}; packed differs by {largest:.1e} of the largest output",
            flush=True,
        )


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / one.float().abs().max())


def _per_call(spread: object) -> str:
    return f"{spread.median / CALLS:7.1f} [{spread.low / CALLS:.1f}, {spread.high / CALLS:.1f}]"


COMMANDS = {"decode": decode, "native": native}
