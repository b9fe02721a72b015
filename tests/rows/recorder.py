# SPDX-License-Identifier: Apache-2.0
"""Compares every MoE call of a running engine with the truth from the scheduler's own request states.

Truth is taken where no runner code has touched it: after ``Scheduler.schedule`` returned, from its requests. That the
rows of a call belong to the requests at all is checked by their tokens and positions.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support import cpu_engine


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


class BatchV1:
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


class BatchV2:
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
            self.batch = BatchV2(runner)
        else:
            self.batch = BatchV1(runner)
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
