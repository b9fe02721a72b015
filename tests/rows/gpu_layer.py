# SPDX-License-Identifier: Apache-2.0
"""One armed MoE layer on real b12x kernels: which rows of a step ran A4, decided from the outputs.

``python -m rows.gpu_layer OUT.json`` writes the findings; tests/gpu/engine-tests makes the environment.
:func:`findings` with device "cpu" runs the same checks on the reference b12x, without those that need CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rows import harness
from rows.warming import Compilations, model_of, warm_up, warm_up_on_any_device

GEOMETRY = harness.Geometry(E=8, H=512, I=256, topk=2)
"""The smallest that both providers accept; ids and weights take 8 bytes a row, so odd slices start off 16 bytes."""

MAX_ROWS = 64

STEPS: dict[str, tuple[int, list[tuple[int, int]], int]] = {
    "all prefill": (24, [(0, 24)], 0),
    "one prefill row": (9, [(4, 5)], 0),
    "leading": (24, [(0, 16)], 0),
    "trailing": (24, [(8, 24)], 0),
    "small parts": (40, [(3, 9), (12, 20), (25, 33)], 0),
    "off 16 bytes": (25, [(5, 9), (17, 24)], 0),
    "off 16 bytes, large parts": (61, [(1, 22), (35, 60)], 0),
    "off 16 bytes, same kernel": (28, [(0, 5)], 0),
    "many parts": (64, [(row, row + 2) for row in range(1, 60, 4)], 0),
    "every other row": (33, [(row, row + 1) for row in range(0, 33, 2)], 0),
    "padded": (32, [(2, 20)], 5),
    "many parts and padded": (48, [(row, row + 3) for row in range(0, 40, 5)], 6),
}
"""Name to rows, prefill ranges and rows of padding at the end (ids of -1)."""

FORMS = {"sliced": 1000, "gathered": 0}
"""Name to MAX_SLICED_PARTS."""


def start(device: str) -> None:
    """Prepare this process; call it before anything imports vllm."""
    os.environ["VLLM_B12X_MOE_FP4_FORCE_A16"] = "1"
    os.environ["B12X_W4A16_A4_PREFILL_MIN_TOKENS"] = "1"
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    from support import sm120

    if device == "cpu":
        from support import reference_b12x

        sm120.install()
        reference_b12x.install()
        return
    from gpu import sm90

    sm90.install()
    sm120.allow_b12x()
    import vllm.distributed.parallel_state as parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    parallel_state._PP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    init_workspace_manager(torch.device("cuda", 0))


@dataclass
class Values:
    """A layer's weights as loaded: dequantised float64 ``[E, 2I, H]`` (gate first) and ``[E, H, I]``, and b12x's
    activation global scales."""

    w13: torch.Tensor
    w2: torch.Tensor
    input: float
    intermediate: list[float]

    @staticmethod
    def of(layer: Any, device: str) -> Values:
        """Of a layer on CPU whose weights have not been processed yet."""
        from gpu import moe

        def dequantized(name: str, global_scale: torch.Tensor) -> torch.Tensor:
            codes = getattr(layer, f"{name}_weight").data.to(device)
            scales = getattr(layer, f"{name}_weight_scale").data.to(device)
            return moe.dequantized(codes, scales, global_scale.data.to(device))

        return Values(
            dequantized("w13", layer.w13_weight_scale_2[:, 0]),
            dequantized("w2", layer.w2_weight_scale_2),
            float(layer.w13_input_scale.reciprocal().min()),
            layer.w2_input_scale.reciprocal().tolist(),
        )

    def reference(self, batch: harness.Batch, *, a4: bool) -> torch.Tensor:
        """Float64 ``[rows, H]``: silu-gated experts; with *a4* activations are quantised to NVFP4."""
        from gpu import moe

        x = moe.quantized(batch.x, self.input) if a4 else batch.x.double()
        out = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
        for expert in range(self.w13.shape[0]):
            row, slot = (batch.ids == expert).nonzero(as_tuple=True)
            if not row.numel():
                continue
            gate, up = (x[row] @ self.w13[expert].T).chunk(2, -1)
            middle = torch.nn.functional.silu(gate) * up
            if a4:
                middle = moe.quantized(middle.to(torch.bfloat16), self.intermediate[expert])
            weights = batch.weights[row, slot, None].double()
            out.index_add_(0, row, weights * (middle @ self.w2[expert].T))
        return out


class Layer:
    """A loaded layer and what it must compute."""

    def __init__(self, device: str, algo: str = "NVFP4", seed: int = 0) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        self.device = device
        self.model = torch.nn.Module()
        self.model.experts = self.module = harness.make_layer(
            algo, GEOMETRY, moe={"device": device}
        )
        harness.fill(self.module, seed, calibrated=algo == "NVFP4")
        if algo == "NVFP4":
            self.values = Values.of(self.module, device)
        self.module.to(device)
        with torch.device(device):
            record_metadata_for_reloading(self.model)
        self.module.quant_method.process_weights_after_loading(self.module)

    def call(self, batch: harness.Batch, prefill: Any = None) -> torch.Tensor:
        """One call in a step with these prefill ranges; None leaves the row types empty."""
        rows = None if prefill is None else batch.x.shape[0]
        with harness.step(rows, prefill or ()):
            return harness.call(self.module, batch)

    def reload(self, seed: int) -> None:
        """Other weights by vLLM's layerwise reload."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        donor = harness.make_layer("NVFP4", GEOMETRY)
        harness.fill(donor, seed)
        self.values = Values.of(donor, self.device)
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
            for name, parameter in donor.named_parameters():
                for expert, value in enumerate(parameter.data):
                    shards = {"w2": value}
                    if name.startswith("w13"):
                        shards = dict(zip(("w1", "w3"), value.chunk(2), strict=True))
                    for shard, part in shards.items():
                        target = getattr(self.module, name)
                        target.weight_loader(
                            target,
                            part.squeeze(),
                            f"experts.{name}",
                            shard_id=shard,
                            expert_id=expert,
                        )
            finalize_layerwise_reload(self.model, SimpleNamespace(dtype=torch.bfloat16))


def batch_of(rows: int, device: str, seed: int, padded: int = 0) -> harness.Batch:
    batch = harness.make_batch(rows, GEOMETRY, seed, padded)
    return harness.Batch(batch.x.to(device), batch.weights.to(device), batch.ids.to(device))


def slice_of(batch: harness.Batch, rows: Any) -> harness.Batch:
    return harness.Batch(
        batch.x[rows].contiguous(), batch.weights[rows].contiguous(), batch.ids[rows].contiguous()
    )


@dataclass
class Modes:
    """Rows that ran A4 as the outputs say it, and how sure that is."""

    a4: list[bool]
    own: float
    other: float

    @staticmethod
    def of(out: torch.Tensor, values: Values, batch: harness.Batch, rows: int) -> Modes:
        """Of the first *rows* rows: each row belongs to the reference that it is nearer to.

        ``own`` is the largest relative distance of a row to its reference, ``other`` the smallest to the other one.
        """
        real = slice_of(batch, slice(0, rows))
        wanted = [values.reference(real, a4=a4) for a4 in (False, True)]
        distances = torch.stack(
            [(out[:rows].double() - ref).norm(dim=1) / ref.norm(dim=1) for ref in wanted]
        )
        distances = distances.nan_to_num(nan=float("inf"))
        own, nearest = distances.min(0)
        return Modes(
            (nearest == 1).tolist(), float(own.max()), float(distances.max(0).values.min())
        )


def truth(rows: int, prefill: list[tuple[int, int]]) -> list[bool]:
    return [any(lo <= row < hi for lo, hi in prefill) for row in range(rows)]


def mixed_step(layer: Layer, name: str, form: str) -> dict[str, Any]:
    """One step of ``STEPS``: modes from the outputs, and W4A16 rows beside pure W4A16 calls."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import parts

    parts.MAX_SLICED_PARTS = FORMS[form]
    rows, prefill, padded = STEPS[name]
    batch = batch_of(rows, layer.device, seed=rows + padded, padded=padded)
    real = rows - padded
    out = layer.call(batch, prefill)
    modes = Modes.of(out, layer.values, batch, real)
    split = parts.make_split(rows, tuple(prefill))
    order = torch.arange(rows) if split.order is None else torch.from_numpy(split.order)
    order = order.to(layer.device)
    whole = layer.call(batch)
    alone_equal, same_regime_equal, largest, same_regime = True, True, 0.0, 0
    for part in split.parts:
        if part.a4:
            continue
        where = order[part.lo : part.hi]
        where = where[where < real]
        if not where.numel():
            continue
        # The same launch by itself: same rows, same plan, but no other launches, slices or gathering.
        alone = layer.call(slice_of(batch, order[part.lo : part.hi]))[: where.numel()]
        alone_equal &= torch.equal(out[where], alone)
        if regime(part.hi - part.lo) == regime(rows):
            same_regime += where.numel()
            same_regime_equal &= torch.equal(out[where], whole[where])
        scale = whole[:real].float().abs().max()
        largest = max(
            largest, float((out[where].float() - whole[where].float()).abs().max() / scale)
        )
    return {
        "right": modes.a4 == truth(real, prefill),
        "own": modes.own,
        "other": modes.other,
        "launches": len(split.parts),
        "gathered": split.order is not None,
        "finite": bool(out[:real].isfinite().all()),
        "padding_finite": bool(out[real:].isfinite().all()),
        "w4a16_alone_equal": alone_equal,
        "w4a16_same_regime_rows": same_regime,
        "w4a16_same_regime_equal": same_regime_equal,
        "w4a16_largest_difference": largest,
    }


def regime(rows: int) -> Any:
    """What decides which W4A16 kernel runs for *rows* rows over native weights."""
    from support.reference_b12x import regimes
    from vllm.model_executor.layers.fused_moe.b12x_a4.plans import bucket_edge

    if rows <= regimes.SMALL_TOKENS:  # kernels compiled for one row count
        return rows
    return regimes.w4a16(bucket_edge(rows), GEOMETRY.topk, GEOMETRY.E, packed_weights=False)


def unarmed_layer(device: str) -> dict[str, Any]:
    """A weight-only layer keeps upstream's class and ignores row types."""
    layer = Layer(device, "W4A16_NVFP4")
    batch = batch_of(40, device, seed=3)
    typed = layer.call(batch, [(3, 9), (12, 30)])
    return {
        "class": type(harness.experts_of(layer.module)).__name__,
        "equal": torch.equal(typed, layer.call(batch)),
        "layer": layer,
    }


def no_device_read(layer: Layer) -> dict[str, bool]:
    """Calls with new row types, sliced and gathered, while every synchronising CUDA operation raises."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import parts

    found = {}
    for name, form in product(("small parts", "many parts", "many parts and padded"), FORMS):
        parts.MAX_SLICED_PARTS = FORMS[form]
        rows, prefill, padded = STEPS[name]
        batch = batch_of(rows, layer.device, seed=rows + padded, padded=padded)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = layer.call(batch, prefill)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        modes = Modes.of(out, layer.values, batch, rows - padded)
        found[f"{name}, {form}"] = modes.a4 == truth(rows - padded, prefill)
    return found


def capture_and_reload(layer: Layer) -> dict[str, Any]:
    """Captured calls run W4A16 whatever the row types say; after a reload the same graph serves the new weights."""
    found: dict[str, Any] = {}
    for rows, prefill in ((6, [(0, 4)]), (33, [(0, 20)])):
        batch = batch_of(rows, layer.device, seed=rows)
        layer.call(batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.call(batch, prefill)
        result = {}
        for moment in ("captured", "reloaded"):
            if moment == "reloaded":
                layer.reload(seed=20 + rows)
            captured.fill_(float("nan"))
            graph.replay()
            modes = Modes.of(captured, layer.values, batch, rows)
            mixed = Modes.of(layer.call(batch, prefill), layer.values, batch, rows)
            result[moment] = {
                "w4a16_rows": rows - sum(modes.a4),
                "own": modes.own,
                "equals_eager": torch.equal(captured, layer.call(batch)),
                "mixed_right": mixed.a4 == truth(rows, prefill),
            }
        found[str(rows)] = result
    return found


def sweep(armed: Layer, unarmed: Layer, count: Callable[[], dict[str, int]]) -> list[Any]:
    """Sizes whose calls compiled or loaded a kernel although everything was warmed up."""
    from vllm.model_executor.layers.fused_moe.b12x_a4 import parts

    cold = []
    for rows, form in product(range(1, MAX_ROWS + 1), FORMS):
        parts.MAX_SLICED_PARTS = FORMS[form]
        batch = batch_of(rows, armed.device, seed=rows)
        for layer, prefill in (
            (armed, None),
            (armed, [(0, rows)]),
            (armed, [(1, rows)] if rows > 1 else None),
            (armed, [(row, row + 1) for row in range(0, rows, 2)]),
            (unarmed, None),
        ):
            before = count()
            layer.call(batch, prefill)
            after = count()
            if after != before:
                cold.append([rows, layer is armed, prefill and prefill[0], after, before])
    return cold


def findings(device: str) -> dict[str, Any]:
    """All checks; those on CUDA only with device "cuda"."""
    start(device)
    from vllm.model_executor.layers.fused_moe.b12x_a4.provider import get_provider

    found: dict[str, Any] = {"provider": get_provider().name, "seconds": {}}
    moment = time.monotonic()

    def finished(name: str) -> None:
        nonlocal moment
        now = time.monotonic()
        found["seconds"][name] = round(now - moment, 1)
        print(f"{name}: {now - moment:.1f} s", file=sys.stderr, flush=True)
        moment = now

    layer = Layer(device)
    found["class"] = type(harness.experts_of(layer.module)).__name__
    unarmed = unarmed_layer(device)
    plain = unarmed.pop("layer")
    found["unarmed"] = unarmed
    finished("load")
    if device != "cpu":
        compilations = Compilations()
        warm_up_on_any_device()
        warm_up(model_of(layer.module, plain.module), max_rows=MAX_ROWS, sizes=(1, 2, 4, 8))
        found["warm-up"] = compilations.count()
        finished("warm-up")
    found["steps"] = {
        form: {name: mixed_step(layer, name, form) for name in STEPS} for form in FORMS
    }
    finished("mixed steps")
    if device != "cpu":
        found["cold"] = sweep(layer, plain, compilations.count)
        finished("sweep")
        found["no_device_read"] = no_device_read(layer)
        found["graphs"] = capture_and_reload(layer)
        finished("capture and reload")
    else:
        layer.reload(seed=5)
        found["step after reload"] = mixed_step(layer, "padded", "sliced")
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(findings("cuda"), indent=1), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # exit handlers wait for things that the stand-ins do not have
