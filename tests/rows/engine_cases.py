# SPDX-License-Identifier: Apache-2.0
"""Real engine runs whose every MoE call is compared with the truth from the scheduler's own request states.

Functions for ``run_child``. The comparison is recorder.py's; reading any tensor while row types are computed raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from support import cpu_engine

from rows.recorder import BatchV1, ModeRecorder, Recorder

_READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)


@contextlib.contextmanager
def reads_forbidden() -> Iterator[None]:
    """Every way to look at a tensor's values from Python raises."""
    import torch

    def refuse(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"the row types read a tensor: {name}")

        return read

    with contextlib.ExitStack() as stack:
        for name in _READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, refuse(name)))
        yield


def _forbid_reads_in_typer() -> None:
    from vllm.v1.worker import gpu_model_runner, moe_row_types
    from vllm.v1.worker.gpu import model_runner as gpu_model_runner_v2

    def guarded(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with reads_forbidden():
                return function(*args, **kwargs)

        return call

    for name in ("step_v1", "step_v2"):
        setattr(moe_row_types.RowTyper, name, guarded(getattr(moe_row_types.RowTyper, name)))
    for module in (gpu_model_runner, gpu_model_runner_v2):
        for name in ("row_types_of", "must_run_eager"):
            setattr(module, name, guarded(getattr(module, name)))


def _start(**options: Any) -> tuple[cpu_engine.Engine, Any, Recorder]:
    engine = cpu_engine.start()
    _forbid_reads_in_typer()
    from vllm.v1.worker import moe_row_types

    moe_row_types.note_armed_layer()
    llm = engine.llm(algo="W4A16_NVFP4", **options)
    recorder = Recorder(engine)
    recorder.watch(llm)
    return engine, llm, recorder


def prompt(length: int, seed: int) -> list[int]:
    return [1 + (seed * 131 + place * 7) % 500 for place in range(length)]


def chunks_and_preemption() -> dict[str, Any]:
    """Prompts shorter and longer than a step; then more tokens than the cache holds, so that requests are preempted
    and recompute prompt and generated tokens."""
    engine, llm, recorder = _start(
        enable_prefix_caching=False, num_gpu_blocks_override=8, max_model_len=128
    )
    tokens = engine.generate(
        llm, [prompt(n, n) for n in (5, 40, 3, 20, 60, 1, 33, 97)], max_tokens=3
    )
    tokens += engine.generate(llm, [prompt(n, n) for n in (20, 25, 31, 18)], max_tokens=50)
    return recorder.result(tokens)


def prefix_hits_and_drafts() -> dict[str, Any]:
    """Prompts that find all, most or part of themselves in the cache, with n-gram drafts: verification rows beside
    prompt chunks, some drafts accepted and some rejected."""
    _simple_drafts_v2()
    engine, llm, recorder = _start(
        enable_prefix_caching=True,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    tokens = engine.generate(llm, [prompt(n, 3) * 2 for n in (4, 12, 20, 30, 9, 16)], max_tokens=8)
    base = prompt(97, 1)
    tokens += engine.generate(llm, [base[:96]], max_tokens=3)
    # 96 tokens are cached in blocks of 32: one token left, two left, and a new branch after 64.
    later = [base, [*base, 9], base[:64] + prompt(30, 5), prompt(20, 8)]
    tokens += engine.generate(llm, later, max_tokens=3)
    return recorder.result(tokens)


def _simple_drafts_v2() -> None:
    """Let the V2 runner's n-gram speculator propose the last token again, then a wrong one: triton's interpreter
    cannot run its kernels. Which drafts they are does not matter here."""

    def propose(
        self: Any, input_batch: Any, *args: Any, last_sampled: Any = None, **kwargs: Any
    ) -> Any:
        num_reqs = input_batch.num_reqs
        drafts = self.drafts[:num_reqs]
        if not kwargs.get("dummy_run"):
            last_sampled = args[6] if last_sampled is None else last_sampled
            drafts.copy_(last_sampled.view(-1)[input_batch.idx_mapping][:, None].expand_as(drafts))
            drafts[:, -1] += 1
            drafts[::2, 1] += 1
        return drafts

    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        cpu_engine.start()
        from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

        NgramGPUSpeculator.propose = propose


def modes_of_armed_layers() -> dict[str, Any]:
    """A calibrated checkpoint served W4A16, real b12x plans: the rows that each layer really launches in A4."""
    engine = cpu_engine.start()
    _forbid_reads_in_typer()
    llm = engine.llm(
        algo="NVFP4", enable_prefix_caching=False, num_gpu_blocks_override=8, max_model_len=128
    )
    recorder = ModeRecorder(engine)
    recorder.watch(llm)
    tokens = engine.generate(
        llm, [prompt(n, n) for n in (5, 40, 3, 20, 60, 1, 33, 97)], max_tokens=3
    )
    tokens += engine.generate(llm, [prompt(n, n) for n in (20, 25, 31, 18)], max_tokens=20)
    result = recorder.result(tokens)
    result["armed"] = [type(experts).__name__ for experts in engine.experts(llm)]
    return result


def without_one_token_rule() -> dict[str, Any]:
    """``chunks_and_preemption`` with a broken rule, which it must notice."""
    cpu_engine.start()
    from vllm.v1.worker import moe_row_types

    rule = moe_row_types.prefill_ranges

    def broken(num_scheduled: Any, num_drafts: Any, num_computed: Any, *rest: Any) -> Any:
        return rule(num_scheduled, num_drafts, num_computed * (num_scheduled != 1), *rest)

    moe_row_types.prefill_ranges = broken
    return chunks_and_preemption()


def row_typers() -> dict[str, dict[str, Any]]:
    """Three engines: the variable unset, set without an armed layer, set with one."""
    engine = cpu_engine.start()
    from vllm.model_executor.layers.fused_moe.b12x_a4.settings import ARM, get_settings
    from vllm.v1.worker.moe_row_types import RowTyper

    result = {}
    for name, value, armed in (("off", None, True), ("none armed", "1", False), ("on", "1", True)):
        os.environ.pop(ARM, None)
        if value is not None:
            os.environ[ARM] = value
        get_settings.cache_clear()
        RowTyper.armed = RowTyper.runs_a4 = armed
        result[name] = _row_typer_of(engine)
    return result


def _row_typer_of(engine: cpu_engine.Engine) -> dict[str, Any]:
    """Whether the runner has a row typer, and what its dummy and real MoE calls and its dispatches carry."""
    seen: list[Any] = []
    eager: list[bool | None] = []

    def launch(**call: Any) -> None:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        call["output"].copy_(call["hidden_states"])
        seen.append(get_forward_context().moe_row_types if is_forward_context_available() else None)

    engine.replace_launch(launch)
    llm = engine.llm(algo="W4A16_NVFP4")
    runner = engine.runner(llm)
    runner._dummy_run(16)  # as profiling, warm-up and capture do
    at_start = list(seen)
    seen.clear()
    batch = BatchV1(runner)

    def watched(**call: Any) -> None:
        launch(**call)
        eager.append(batch.eager)

    engine.replace_launch(watched)
    engine.generate(llm, [prompt(n, n) for n in (5, 40)], max_tokens=3)
    result = {
        "typer": runner.moe_row_typer is not None,
        "calls_at_start": len(at_start),
        "with_row_types_at_start": sum(row_types is not None for row_types in at_start),
        "calls": len(seen),
        "with_row_types": sum(row_types is not None for row_types in seen),
        "eager_steps": sum(map(bool, eager)),
    }
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()
    return result
