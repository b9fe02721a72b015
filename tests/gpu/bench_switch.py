# SPDX-License-Identifier: Apache-2.0
"""What VLLM_B12X_A4_PREFILL_EAGER costs: a step with prefill rows, replayed from a CUDA graph and dispatched eagerly.

A small engine with ``FULL`` graphs and real b12x kernels holds seven decoding requests; prompts of several sizes join
them, each in one step, with the switch off and on in turn, and a decode-only step follows every one of them. Times are
of a whole engine step: schedule, forward, sample. A step of a real model costs max(host, device): with kernels as small
as here it is the host's time, so the difference per layer is the most that the switch can cost. It is measured twice,
with a model of few and of many layers, so that the part that grows with the layers is known.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gpu.timing import Spread, versions

LAYERS = (2, 12)
DECODING = 7
STEP_ROWS = 256
SIZES = (16, 64, 256)
REPETITIONS = 21


WAYS = ("graph", "eager, W4A16", "eager, A4")
"""Without the switch; eager but with row types left out, to tell what the lost graph costs; with the switch."""


def _steps(llm: Any, typer: Any) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Milliseconds of every step: ``(kind, rows)`` to the samples of every way."""
    from vllm import SamplingParams
    from vllm.model_executor.layers.fused_moe.b12x_a4.experts import DualPlanExperts

    split = DualPlanExperts._step_split

    engine = llm.llm_engine
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    serial = iter(range(1_000_000))

    def add(length: int, max_tokens: int) -> None:
        number = next(serial)
        tokens = [1 + (number * 131 + place * 7) % 500 for place in range(length)]
        engine.add_request(
            str(number),
            {"prompt_token_ids": tokens},
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
        )

    def step() -> float:
        wait()
        begin = time.perf_counter()
        engine.step()
        wait()
        return (time.perf_counter() - begin) * 1e3

    for _ in range(DECODING):
        add(4, 4000)
    for _ in range(3):
        step()
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for repetition in range(REPETITIONS + 3):
        for size in SIZES:
            for place in range(len(WAYS)):
                way = WAYS[(place + repetition) % len(WAYS)]
                typer._eager = way != "graph"
                DualPlanExperts._step_split = split if way == "eager, A4" else lambda *_: None
                add(size - DECODING, 1)
                times = {("prefill", size): step(), ("decode only", DECODING): step()}
                if repetition < 3:  # Triton compiles
                    continue
                for key, value in times.items():
                    found.setdefault(key, {name: [] for name in WAYS})[way].append(value)
    DualPlanExperts._step_split = split
    return found


def switch(runner: str = "V2", device: str = "cuda") -> None:
    """Prints the table; SystemExit where there is no patched vLLM to run."""
    from rows import gpu_engine, gpu_runs

    reason = gpu_runs.reason_not_to_run(True) if device == "cuda" else ""
    if reason:
        raise SystemExit(f"switch: {reason}")
    gpu_engine.set_up(runner, device=device)
    from csf import checkpoints
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters

    tables = {}
    for layers in LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            checkpoints.write(
                model, mtp_layer=False, num_hidden_layers=layers, max_position_embeddings=8192
            )
            compilation = None
            if device == "cuda":
                sizes = [1, 2, 4, 8, *SIZES]
                compilation = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}
            llm = gpu_engine.make_llm(
                str(model), device, compilation=compilation, max_model_len=4096, max_num_batched_tokens=STEP_ROWS,
                num_gpu_blocks_override=1024, async_scheduling=False,
            )  # fmt: skip
        before = counters.snapshot()
        tables[layers] = _steps(llm, gpu_engine.runner_of(llm).moe_row_typer)
        rows = {name: value - before[name] for name, value in counters.snapshot().items()}
        print(f"# {layers} layers: counters {rows}", flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    head = versions() if device == "cuda" else "CPU, no graphs: a test of this program only"
    print(f"# an engine step, milliseconds, model runner {runner}. {head}")
    few, many = LAYERS
    for kind in tables[few]:
        medians = {}
        for layers in LAYERS:
            spreads = {way: Spread.of(tables[layers][kind][way]) for way in WAYS}
            medians[layers] = {way: spread.median for way, spread in spreads.items()}
            cells = "  ".join(f"{way} {_text(spread)}" for way, spread in spreads.items())
            print(f"{kind[0]:11s} {kind[1]:4d} rows, {layers:2d} layers: {cells}")
        layer = {way: (medians[many][way] - medians[few][way]) / (many - few) for way in WAYS}
        cells = "  ".join(f"{way} {time:.3f}" for way, time in layer.items())
        print(f"{kind[0]:11s} {kind[1]:4d} rows, a layer:   {cells}", flush=True)


def _text(spread: Spread) -> str:
    return f"{spread.median:.2f} [{spread.low:.2f}, {spread.high:.2f}]"


COMMANDS = {"switch": switch}

if __name__ == "__main__":
    switch("V1", "cpu")
    sys.stdout.flush()
    os._exit(0)
