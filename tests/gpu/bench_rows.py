# SPDX-License-Identifier: Apache-2.0
"""A4 prefill: what a step's row typing costs the host, what ranges cost an MoE call, and native beside packed decode.

* Typing from host arrays beside one read of ``query_start_loc`` from the device, on a step whose forward is still
  running (the read waits for it; that is its cost).
* One MoE call of 1,024 rows with 1 to 64 prefill ranges, one decode row after each, beside one W4A16 launch: as slices
  and gathered, by the product's own experts class at GLM-5.3-Flash TP2 size.
* W4A16 decode, packed beside native, is ``bench_decode``.

A call's device time is that of a graph of it, its host time that of issuing it; eager is both, between two events. On
SM90 the FP4 kernels are emulated: read the trends of device times, not the microseconds. Host times are real.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpu.timing import Spread, device_time, graph_of, host_time, versions

ROW_TYPES = Path(__file__).resolve().parents[2] / "overlay/vllm/v1/worker/moe_row_types.py"


def _prefill_ranges():  # type: ignore[no-untyped-def]
    """The product's own rule, taken from its file: the module itself needs vLLM only for its logger and types."""
    from types import ModuleType, SimpleNamespace

    stand_in = ModuleType("vllm.logger")
    stand_in.init_logger = lambda name: SimpleNamespace(warning=print)  # type: ignore[attr-defined]
    if importlib.util.find_spec("vllm") is None:
        sys.modules.setdefault("vllm", ModuleType("vllm"))
        sys.modules.setdefault("vllm.logger", stand_in)
    spec = importlib.util.spec_from_file_location("moe_row_types", ROW_TYPES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moe_row_types"] = module
    spec.loader.exec_module(module)
    return module.prefill_ranges


def typing(requests: tuple[int, ...] = (1, 16, 256)) -> None:
    prefill_ranges = _prefill_ranges()
    print(f"# row typing per step, host microseconds. {versions()}")
    rng = np.random.default_rng(0)
    for count in requests:
        scheduled = rng.integers(1, 64, count).astype(np.int32)
        computed = rng.integers(0, 4096, count).astype(np.int32)
        prompt = rng.integers(1, 4096, count).astype(np.int32)
        starts = torch.from_numpy(
            np.concatenate(([0], np.cumsum(scheduled))).astype(np.int32)
        ).cuda()

        def host(arrays: tuple = (scheduled, computed, prompt)) -> None:
            prefill_ranges(arrays[0], None, arrays[1], arrays[2])

        def read(starts: torch.Tensor = starts) -> None:
            starts.tolist()

        cells = []
        for name, function, busy in (
            ("host arrays", host, True),
            ("device read, idle", read, False),
            ("device read", read, True),
        ):
            samples = []
            for _ in range(51):
                torch.cuda.synchronize()
                if busy:
                    torch.cuda._sleep(2_000_000)  # about 1.1 ms of queued forward
                begin = time.perf_counter()
                function()
                samples.append((time.perf_counter() - begin) * 1e6)
            cells.append(f"{name} {Spread.of(samples)}")
        print(f"{count:4d} requests  " + "  ".join(cells), flush=True)


def ranges(rows: int = 1024, counts: tuple[int, ...] = (1, 4, 16, 2, 8, 64)) -> None:
    from gpu import armed_layer

    layer = armed_layer.make()
    layer.prepare(rows)
    print(f"# one MoE call of {rows} rows, {armed_layer.GEOMETRY}, by prefill ranges. {versions()}")
    for count in counts:
        variants = {"one W4A16 launch": partial(layer.run, None)}
        for name, split in armed_layer.splits(rows, count).items():
            variants[f"{count} ranges, {name}"] = partial(layer.run, split)
        for variant in variants.values():
            variant()  # compiles
        host = host_time(variants, calls=1, repetitions=7)
        graphs = {name: graph_of(variant).replay for name, variant in variants.items()}
        device = device_time(graphs, calls=1, repetitions=5)
        eager = device_time(variants, calls=1, repetitions=5)
        for name in variants:
            print(
                f"{name:22s} device {device[name]} us, host {host[name]} us, eager {eager[name]} us",
                flush=True,
            )


def rows() -> None:
    """All figures of row types in one go."""
    from gpu import bench_decode

    typing()
    ranges()
    bench_decode.native()


COMMANDS = {"typing": typing, "ranges": ranges, "rows": rows}
