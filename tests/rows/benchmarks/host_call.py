#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of one MoE call: upstream's experts class beside the dual-plan one, in one run, interleaved.

What is timed is vLLM's FusedMoEKernel from prepare to finalize with the launch replaced by nothing (so the class's own
work shows) and, as a second row, with b12x's real bind. Runs without a GPU; on a machine with one the same commands
apply. Medians of blocks with their quartiles, in microseconds of this thread's CPU time, so that other processes do
not count.

  scripts/test --run tests/rows/benchmarks/host_call.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["VLLM_B12X_MOE_FP4_FORCE_A16"] = "1"
BUDGET_US, BUDGET_SHARE = 2.0, 0.02


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 64], help="rows of the decode step"
    )
    parser.add_argument("--blocks", type=int, default=200, help="timed blocks of each variant")
    parser.add_argument("--calls", type=int, default=50, help="calls per block")
    options = parser.parse_args(argv)
    from support import sm120

    sm120.install()
    import torch
    import vllm.model_executor.layers.fused_moe.b12x as b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings

    from rows import harness

    torch.set_num_threads(1)
    layers = {}
    for name, arm in (("upstream", None), ("dual plan", "1")):
        os.environ.pop(settings.ARM, None)
        if arm:
            os.environ[settings.ARM] = arm
        settings.get_settings.cache_clear()
        layers[name] = harness.load_layer(harness.Geometry())
    fused_moe = b12x._require_b12x_fused_moe()

    def nothing(**call: Any) -> None:
        pass

    def bind_only(**call: Any) -> None:
        fused_moe.bind(
            call["plan"], scratch=call["scratch"], a=call["hidden_states"], experts=call["prepared"],
            topk_weights=call["topk_weights"], topk_ids=call["topk_ids"], output=call["output"],
            input_scales_static=True, unit_scale_contract=call["unit_scale_contract"],
        )  # fmt: skip

    print(
        f"torch {torch.__version__}, Python {sys.version.split()[0]}; {options.blocks} blocks of {options.calls} calls"
    )
    print(
        f"{'rows':>5} {'launch':>10} {'upstream us':>24} {'dual plan us':>24} {'difference us':>24}  budget us"
    )
    worst = 0.0
    for launch_name, launch in (("none", nothing), ("real bind", bind_only)):
        b12x._run_b12x_moe_plan = launch
        for rows in options.rows:
            batch = harness.make_batch(rows, harness.Geometry())
            calls = {
                name: (lambda layer=layer, batch=batch: harness.call(layer, batch))
                for name, layer in layers.items()
            }
            with harness.step(rows, []):
                times = measure(calls, options.blocks, options.calls)
            difference = [a - b for a, b in zip(times["dual plan"], times["upstream"], strict=True)]
            budget = max(BUDGET_US, BUDGET_SHARE * statistics.median(times["upstream"]))
            worst = max(worst, statistics.median(difference) - budget)
            cells = [spread(times["upstream"]), spread(times["dual plan"]), spread(difference)]
            print(
                f"{rows:>5} {launch_name:>10} "
                + " ".join(f"{cell:>24}" for cell in cells)
                + f"  {budget:.1f}"
            )
    print("within budget" if worst <= 0 else f"over budget by {worst:.1f} us")
    return 0 if worst <= 0 else 1


def measure(
    variants: dict[str, Callable[[], Any]], blocks: int, calls: int
) -> dict[str, list[float]]:
    """CPU microseconds per call of each block; variants take turns, and who goes first alternates."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(calls):
            call()
    for block in range(blocks):
        order = list(variants.items())
        for name, call in order if block % 2 else reversed(order):
            start = time.thread_time()
            for _ in range(calls):
                call()
            times[name].append((time.thread_time() - start) / calls * 1e6)
    return times


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


if __name__ == "__main__":
    raise SystemExit(main())
