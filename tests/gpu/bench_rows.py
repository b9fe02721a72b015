# SPDX-License-Identifier: Apache-2.0
"""Row typing: what a step costs the host, and what an MoE call split into ranges costs the device.

* Typing from host arrays beside one read of ``query_start_loc`` from the device, on a step whose forward is still
  running (the read waits for it; that is its cost).
* One MoE call of 1,024 rows as 1, 4, 16 and 64 alternating A4 and W4A16 ranges, as slices and gathered by mode, beside
  one W4A16 launch; small layer, real b12x kernels (emulated FP4 on SM90: read the trend, not the microseconds).
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import torch

from gpu.timing import Spread, device_time, host_time, versions

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


def ranges(rows: int = 1024, parts: tuple[int, ...] = (1, 4, 16, 64)) -> None:
    from gpu import moe

    size = moe.Size(64, 1024, 512, 4)
    prepared = moe.prepare(moe.random_weights(size, 0))
    call = moe.random_call(size, rows, 0)
    output = torch.empty_like(call.x)
    variants = {"one W4A16 launch": lambda: prepared.run("w4a16", call, output)}
    for count in parts:
        step = rows // count
        pieces = [
            (
                "nvfp4" if index % 2 == 0 else "w4a16",
                moe.Call(
                    *(
                        t[index * step : (index + 1) * step]
                        for t in (call.x, call.ids, call.weights)
                    )
                ),
                output[index * step : (index + 1) * step],
            )
            for index in range(count)
        ]

        def run(pieces: list = pieces) -> None:
            for mode, piece, target in pieces:
                prepared.run(mode, piece, target)

        variants[f"{count} ranges"] = run
        if count > 1:
            variants[f"{count} gathered"] = _gathered(prepared, call, output, step, count)
    print(f"# one MoE call of {rows} rows, {size}, by number of ranges. {versions()}")
    host = host_time(variants, calls=3, repetitions=7)
    for name, spread in device_time(variants, calls=3, repetitions=11).items():
        print(f"{name:18s} between events {spread} us, host {host[name]} us", flush=True)


def _gathered(prepared, call, output, step: int, count: int):  # type: ignore[no-untyped-def]
    """The same ranges as the product runs many of them: rows gathered by mode, two launches, scattered back."""
    from gpu import moe

    device = call.x.device
    ranges = torch.arange(step * count, device=device).view(count, step)
    order = torch.cat((ranges[1::2].flatten(), ranges[0::2].flatten()))
    split = ranges[1::2].numel()

    def run() -> None:
        x, ids, weights = (t.index_select(0, order) for t in (call.x, call.ids, call.weights))
        target = torch.empty_like(x)
        for mode, rows in (("w4a16", slice(0, split)), ("nvfp4", slice(split, None))):
            prepared.run(mode, moe.Call(x[rows], ids[rows], weights[rows]), target[rows])
        output.index_copy_(0, order, target)

    return run


COMMANDS = {"typing": typing, "ranges": ranges}
