# SPDX-License-Identifier: Apache-2.0
"""Real engine runs whose every MoE call is compared with the truth from the scheduler's own request states.

Functions for ``run_child``. Truth is taken where no runner code has touched it: after ``Scheduler.schedule`` returned,
from its requests. That the rows of a call belong to the requests at all is checked by their tokens and positions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from support import cpu_engine

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


@dataclass
class Scheduled:
    """One request of one step, as the scheduler sees it."""

    prompt_tokens: list[int]
    prompt: int
    computed: int
    scheduled: int
    drafts: int
    preemptions: int

    def row_types(self) -> list[bool]:
        one_over_context = self.scheduled - self.drafts == 1 and self.computed > 0
        prefill = self.computed < self.prompt and not one_over_context
        return [prefill and row < self.scheduled - self.drafts for row in range(self.scheduled)]


class _BatchV1:
    """The order of the batch that the V1 runner is executing, and its rows' inputs."""

    name = "V1"

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.eager: bool | None = None
        determine = runner._determine_batch_execution_and_padding

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.eager = kwargs.get("force_eager", False)
            return determine(*args, **kwargs)

        runner._determine_batch_execution_and_padding = watched

    def req_ids(self) -> list[str]:
        return self.runner.input_batch.req_ids

    def positions_and_tokens(self) -> tuple[list[int], list[int]]:
        positions = self.runner.positions
        positions = positions.gpu if hasattr(positions, "gpu") else positions
        return positions.tolist(), self.runner.input_ids.gpu.tolist()


class _BatchV2:
    """The same of the V2 runner."""

    name = "V2"

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.last: list[str] = []
        self.eager: bool | None = None
        from vllm.v1.worker.gpu import model_runner

        gather = runner.gather_batch_req_state
        dispatch = model_runner.dispatch_cg_and_sync_dp

        def watched(*args: Any, **kwargs: Any) -> Any:
            state, uniform = gather(*args, **kwargs)
            if state is not None:
                self.last = list(state.req_ids)
            return state, uniform

        def watched_dispatch(*args: Any, **kwargs: Any) -> Any:
            self.eager = kwargs["need_eager"]
            return dispatch(*args, **kwargs)

        runner.gather_batch_req_state = watched
        model_runner.dispatch_cg_and_sync_dp = watched_dispatch

    def req_ids(self) -> list[str]:
        return self.last

    def positions_and_tokens(self) -> tuple[list[int], list[int]]:
        buffers = self.runner.input_buffers
        return buffers.positions.tolist(), buffers.input_ids.tolist()


class Recorder:
    """Watches the scheduler, the row typer and the MoE calls of one engine."""

    def __init__(self, engine: cpu_engine.Engine, reads_inputs: bool = True) -> None:
        self.engine = engine
        self.reads_inputs = reads_inputs  # False where a device read would be an error
        self.eager_switch = os.environ.get("VLLM_B12X_A4_PREFILL_EAGER") == "1"
        self.steps: list[dict[str, Scheduled]] = []
        self.kinds: dict[str, int] = {}
        self.rows = 0
        self.prefill_rows = 0
        self.checked = 0

    def watch(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        runner = self.engine.runner(llm)
        if hasattr(runner, "req_states"):  # V2 sorts every batch anew
            self.batch = _BatchV2(runner)
        else:
            self.batch = _BatchV1(runner)
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                self.steps.append(
                    {
                        name: self._scheduled(scheduler.requests[name], count, output)
                        for name, count in output.num_scheduled_tokens.items()
                    }
                )
            return output

        scheduler.schedule = watched
        self.engine.replace_launch(self.launch)

    def _scheduled(self, request: Any, count: int, output: Any) -> Scheduled:
        return Scheduled(
            prompt_tokens=list(request.prompt_token_ids),
            prompt=request.num_prompt_tokens,
            computed=request.num_computed_tokens - count,  # schedule() has advanced it
            scheduled=count,
            drafts=len(output.scheduled_spec_decode_tokens.get(request.request_id, ())),
            preemptions=request.num_preemptions,
        )

    def launch(self, **call: Any) -> None:
        from vllm.forward_context import get_forward_context

        call["output"].copy_(call["hidden_states"])
        self._check(call["hidden_states"].shape[0], get_forward_context().moe_row_types)

    def _check(self, rows: int, row_types: Any) -> None:
        step = self.steps[-1]
        batch = [step[name] for name in self.batch.req_ids()]
        wanted: list[bool] = []
        for request in batch:
            wanted += request.row_types()
        if self.reads_inputs:
            self._check_inputs(batch)
        found = [False] * rows
        if row_types is not None:
            assert row_types.num_rows == rows, (row_types, rows)
            assert row_types.prefill, "a context without prefill rows carries no row types"
            for lo, hi in row_types.prefill:
                found[lo:hi] = [True] * (hi - lo)
        assert found == wanted + [False] * (rows - len(wanted)), (batch, row_types)
        assert self.batch.eager is (self.eager_switch and any(wanted)), (self.batch.eager, batch)
        self.checked += 1
        self.rows += rows
        self.prefill_rows += sum(wanted)
        for request in batch:
            for kind in kinds(request):
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if any(wanted) and not all(wanted):
            self.kinds["mixed step"] = self.kinds.get("mixed step", 0) + 1

    def _check_inputs(self, batch: list[Scheduled]) -> None:
        """The rows hold the requests' tokens at the requests' positions."""
        positions, tokens = self.batch.positions_and_tokens()
        row = 0
        for request in batch:
            for position in range(request.computed, request.computed + request.scheduled):
                # Past the prompt async scheduling counts drafts as accepted.
                if request.computed < request.prompt:
                    assert positions[row] == position, (row, positions[row], request)
                if position < request.prompt:
                    assert tokens[row] == request.prompt_tokens[position], (row, request)
                row += 1

    def result(self, tokens: Any) -> dict[str, Any]:
        return {
            "calls": self.checked,
            "rows": self.rows,
            "prefill_rows": self.prefill_rows,
            "scheduled_prefill_rows": sum(
                sum(request.row_types()) for step in self.steps for request in step.values()
            ),
            "kinds": self.kinds,
            "tokens": tokens,
            "runner": self.batch.name,
        }


def kinds(request: Scheduled) -> Iterator[str]:
    """What a request's part of a step stands for; the tests ask for these to have been seen."""
    new = request.scheduled - request.drafts
    if request.computed < request.prompt:
        if request.computed == 0:
            yield "first chunk"
        elif new == 1:
            yield "one-token tail with placeholder drafts" if request.drafts else "one-token tail"
        else:
            yield "later chunk"
        if request.computed + request.scheduled > request.prompt:
            yield "chunk across the prompt's end"
        if request.preemptions:
            yield "resumed inside the prompt"
    elif request.drafts:
        yield "verification"
    elif new > 1:
        yield "recomputed past the prompt"
    else:
        yield "decode"


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


class ModeRecorder(Recorder):
    """Also decides from each layer's output which rows ran A4: the stand-in for b12x's launch negates them."""

    def launch(self, **call: Any) -> None:
        a4 = call["plan"].caps.quant_mode == "nvfp4"
        call["output"].copy_(-call["hidden_states"] if a4 else call["hidden_states"])

    def watch(self, llm: Any) -> None:
        super().watch(llm)
        for experts in self.engine.experts(llm):
            experts.apply = self._watched(experts.apply)

    def _watched(self, apply: Any) -> Any:
        import inspect

        from vllm.forward_context import get_forward_context

        signature = inspect.signature(apply)

        def watched(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            rows = given["hidden_states"].clone()
            apply(*args, **kwargs)
            self._check(rows.shape[0], get_forward_context().moe_row_types)
            step = self.steps[-1]
            wanted = [t for name in self.batch.req_ids() for t in step[name].row_types()]
            for row, (before, after) in enumerate(zip(rows, given["output"], strict=True)):
                assert before.any()
                ran_a4 = row < len(wanted) and wanted[row]
                assert after.equal(-before if ran_a4 else before), (row, wanted)

        return watched


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
        RowTyper.armed = armed
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
    batch = _BatchV1(runner)

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
