# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step are prefill rows, from arrays that the model runner has on the host.

The rule, the same in both model runners. A request's rows are prefill rows if before the step the request has
computed less than its prompt, except where the step computes one new prompt token over existing context (the runners
treat such a request as a decode, too). So

* a resumed request's chunk that starts inside the prompt is prefill whole, even where it recomputes generated tokens;
  a chunk that starts past the prompt is not;
* a first chunk of one token is prefill, a one-token tail is not;
* draft tokens that are verified, padding, and the rows of dummy, capture and drafter forwards are not prefill.

The result travels in ``ForwardContext.moe_row_types``. Nothing here reads the device: every array is numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch

logger = init_logger(__name__)

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MoERowTypes:
    """Row types of one forward context.

    Attributes:
        num_rows: rows that the model sees in this context, padding included.
        prefill: ordered, disjoint, non-adjacent ranges ``[lo, hi)`` of prefill rows; all other rows are decode,
            verification or padding.
    """

    num_rows: int
    prefill: Ranges


def prefill_ranges(
    num_scheduled: np.ndarray,
    num_drafts: np.ndarray | None,
    num_computed: np.ndarray,
    num_prompt: np.ndarray,
    num_tokens: int | None = None,
) -> Ranges:
    """Ranges of prefill rows of a batch whose requests lie one after the other in array order.

    Args:
        num_scheduled: [R] rows of each request in this step, drafts included.
        num_drafts: [R] how many of them are drafts to verify (the last ones); None if there are none at all.
        num_computed: [R] tokens that the request had computed before this step; beyond the prompt it may be an
            upper bound.
        num_prompt: [R] length of the request's prompt, without tokens that it has generated since.
        num_tokens: rows of the batch without padding, where it is less than ``num_scheduled.sum()``: adaptive
            verification drops drafts on the device. Requests with drafts then lie first, so every other request
            keeps its distance to the end; where a request with drafts lies only the device knows, so its rows are
            not called prefill (the scheduler gives placeholder drafts to a prompt of one token, too).
    """
    is_prefill = num_computed < num_prompt
    if not is_prefill.any():
        return ()
    num_new = num_scheduled if num_drafts is None else num_scheduled - num_drafts
    is_prefill &= (num_new != 1) | (num_computed == 0)
    if not is_prefill.any():
        return ()
    ends = np.cumsum(num_scheduled)
    if num_tokens is not None and num_tokens != ends[-1]:
        ends -= ends[-1] - num_tokens
        if num_drafts is not None:
            is_prefill &= num_drafts == 0
    requests = np.flatnonzero(is_prefill)
    first = ends[requests] - num_scheduled[requests]
    last = first + num_new[requests]
    ranges: list[tuple[int, int]] = []
    for lo, hi in zip(first.tolist(), last.tolist(), strict=True):
        if lo == hi:
            continue
        if ranges and ranges[-1][1] == lo:
            ranges[-1] = (ranges[-1][0], hi)
        else:
            ranges.append((lo, hi))
    return tuple(ranges)


def unsupported_reason(vllm_config: VllmConfig) -> str | None:
    """Why rows of an MoE call can be others than rows of the forward context in this configuration, or None.

    Decided from the configuration alone: row counts that happen to be equal prove nothing.
    """
    parallel = vllm_config.parallel_config
    if parallel.use_sequence_parallel_moe:
        return "sequence-parallel MoE splits the rows over ranks"
    if parallel.data_parallel_size > 1:
        return "data parallelism gathers rows of other ranks (--data-parallel-size)"
    if parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism splits the rows over ranks (--prefill-context-parallel-size)"
    if parallel.use_ubatching:
        return "microbatches run parts of a step (--enable-dbo, --ubatch-size)"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        return "KV-sharing layers run on fewer rows (--kv-sharing-fast-prefill)"
    if vllm_config.cache_config.swa_bounded_replay and _has_decoder_replay(vllm_config):
        return "decoder replay layers run on fewer rows (turn it off with --no-swa-bounded-replay)"
    return None


def _has_decoder_replay(vllm_config: VllmConfig) -> bool:
    # vllm/models/deepseek_v41/decoder_replay_layers.py; model runner V2 only
    model = vllm_config.model_config
    names = getattr(model, "architectures", None) or ()
    return any("DeepseekV41" in name for name in names) and vllm_config.use_v2_model_runner


class StepRows:
    """A step's prefill rows between batch preparation and the forward."""

    __slots__ = ("must_run_eager", "prefill")

    def __init__(self, prefill: Ranges, must_run_eager: bool) -> None:
        self.prefill = prefill
        self.must_run_eager = must_run_eager


class RowTyper:
    """Computes the row types of every step of one model runner. ``make_row_typer`` says whether there is one."""

    armed: ClassVar[bool] = False
    """Whether this process has a layer that looks at row types; ``note_armed_layer`` sets it."""
    runs_a4: ClassVar[bool] = False
    """Whether one of them runs prefill rows in A4; what is about precision only then matters."""

    def __init__(self, eager: bool) -> None:
        self._eager = eager

    def step_v1(
        self, batch: InputBatch, num_scheduled: np.ndarray, scheduler_output: SchedulerOutput
    ) -> StepRows | None:
        """The step of ``GPUModelRunner`` (V1): *num_scheduled* is [num_reqs] in batch order."""
        num_reqs = batch.num_reqs
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        prompt = batch.num_prompt_tokens[:num_reqs]
        if not self.armed or not (computed < prompt).any():
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_drafts = None
        if drafts:
            num_drafts = np.fromiter(
                (len(drafts.get(request, ())) for request in batch.req_ids), np.int32, num_reqs
            )
        return self._step(prefill_ranges(num_scheduled, num_drafts, computed, prompt))

    def step_v2(self, batch: BatchReqState | None, states: RequestState) -> StepRows | None:
        """The step of the V2 ``GPUModelRunner``; *batch* is None for a dummy run.

        The batch's own ``is_prefilling_np`` will not do: after a preemption its ``prefill_len`` counts generated
        tokens.
        """
        if not self.armed or batch is None or not batch.has_prefill:
            return None
        return self._step(
            prefill_ranges(
                batch.num_scheduled_tokens,
                batch.num_draft_tokens_np,
                batch.num_computed_prefill_tokens_np,
                states.prompt_len.np[batch.idx_mapping_np],
                batch.num_tokens,
            )
        )

    def _step(self, prefill: Ranges) -> StepRows | None:
        return StepRows(prefill, self._eager and self.runs_a4) if prefill else None


def note_armed_layer(*, runs_a4: bool = True) -> None:
    """Tell this process's runner that the model has a layer that looks at row types: for A4 prefill, or (*runs_a4*
    False) only for the prefetch of scales, which no precision depends on."""
    RowTyper.armed = True
    RowTyper.runs_a4 |= runs_a4


def make_row_typer(vllm_config: VllmConfig) -> RowTyper | None:
    """The row typer of a model runner; None, and then the runner does nothing, unless A4 prefill or the prefetch of
    compressed scales asks for row types and the configuration supports them."""
    from vllm.model_executor.layers.fused_moe.b12x_a4.settings import ARM, get_settings
    from vllm.model_executor.layers.quantization.nvfp4_csf.settings import wants_prefetch

    settings = get_settings()
    if not settings.enabled and not wants_prefetch(vllm_config):
        return None
    reason = unsupported_reason(vllm_config)
    if reason is not None:
        if settings.enabled:
            logger.warning("%s has no effect: %s. Every row runs as without it.", ARM, reason)
        return None
    return RowTyper(settings.eager)


def must_run_eager(step: StepRows | None) -> bool:
    """Whether the step is to bypass CUDA graphs for its prefill rows' sake."""
    return step is not None and step.must_run_eager


def row_types_of(step: StepRows | None, num_rows: int, mode: CUDAGraphMode) -> MoERowTypes | None:
    """What to put into the forward context of *num_rows* rows (padding included); None without prefill rows.

    Counts the step if A4 prefill is armed and a CUDA graph is replayed: the graph runs every row W4A16.
    """
    from vllm.model_executor.layers.fused_moe.b12x_a4.settings import get_settings

    if step is None:
        return None
    row_types = MoERowTypes(num_rows, step.prefill)
    if mode.value and RowTyper.runs_a4 and get_settings().enabled:
        _count_graph_step(row_types)
    return row_types


def uncounted(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's warm-up: its made-up prompts run as real ones would, but do not show in log and counters."""

    @functools.wraps(warm_up)
    def warm_up_uncounted(*args: Any, **kwargs: Any) -> Any:
        from vllm.model_executor.layers.fused_moe.b12x_a4.counters import COUNTERS

        COUNTERS.paused = True
        try:
            return warm_up(*args, **kwargs)
        finally:
            COUNTERS.paused = False

    return warm_up_uncounted


def _count_graph_step(row_types: MoERowTypes) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters

    counters.count_graph_step(row_types)


__all__ = [
    "MoERowTypes",
    "Ranges",
    "RowTyper",
    "StepRows",
    "make_row_typer",
    "must_run_eager",
    "note_armed_layer",
    "prefill_ranges",
    "row_types_of",
    "uncounted",
    "unsupported_reason",
]
