# SPDX-License-Identifier: Apache-2.0
"""Row counters of A4 prefill, and the log line that shows them.

Counted per step and process, not per layer, from what the host already knows:

* ``a4_rows``: prefill rows that ran with NVFP4 activations.
* ``graph_rows``: prefill rows that ran W4A16 because the step was replayed from a CUDA graph. No Python of the model
  runs in a replay, so the model runner reports these (:func:`count_graph_step`).

Shown in two ways, both by the first rank of the first pipeline stage:

* a log line with the totals, at most once a minute and only while they grow;
* the Prometheus counters ``vllm:b12x_a4_prefill_rows_total`` and ``vllm:b12x_a4_graph_rows_total``. The worker that
  counts is not the process that serves ``/metrics``, so they appear there only in Prometheus' multiprocess mode: start
  the server with ``PROMETHEUS_MULTIPROC_DIR`` set to an empty folder (vLLM does so itself with several API servers).
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.worker.moe_row_types import MoERowTypes

logger = init_logger(__name__)

LOG_INTERVAL_S = 60.0


class StepCounters:
    """Totals of one process since its start."""

    def __init__(self) -> None:
        self.a4_rows = 0
        self.a4_steps = 0
        self.graph_rows = 0
        self.graph_steps = 0
        self.paused = False
        """Whether steps are those of vLLM's warm-up, which runs made-up prompts through the model."""
        self._next_log: float | None = None

    def count_a4_step(self, layer_name: str, num_rows: int, a4_rows: int, parts: int) -> None:
        """A step reached its first armed layer with *a4_rows* of *num_rows* rows in A4."""
        if self.paused:
            return
        if not self.a4_steps:
            logger.info(
                "First A4 prefill call: %s runs %d of %d rows with NVFP4 activations in %d part(s).",
                layer_name,
                a4_rows,
                num_rows,
                parts,
            )
        self.a4_rows += a4_rows
        self.a4_steps += 1
        self._show("prefill", a4_rows)

    def count_graph_step(self, row_types: MoERowTypes | None) -> None:
        """A CUDA graph is about to be replayed for a step with these row types (None: no prefill rows)."""
        if self.paused or row_types is None or not row_types.prefill:
            return
        rows = sum(hi - lo for lo, hi in row_types.prefill)
        self.graph_rows += rows
        self.graph_steps += 1
        self._show("graph", rows)

    def snapshot(self) -> dict[str, int]:
        """The totals by name."""
        return {
            name: getattr(self, name)
            for name in ("a4_rows", "a4_steps", "graph_rows", "graph_steps")
        }

    def _show(self, what: str, rows: int) -> None:
        if not _is_first_rank():
            return
        _prometheus()[what].inc(rows)
        now = time.monotonic()
        if self._next_log is None:
            self._next_log = now + LOG_INTERVAL_S
        if now < self._next_log:
            return
        self._next_log = now + LOG_INTERVAL_S
        logger.info(
            "A4 prefill so far: %d prefill rows with NVFP4 activations (%d steps); "
            "%d prefill rows W4A16 because their step replayed a CUDA graph (%d steps).",
            self.a4_rows,
            self.a4_steps,
            self.graph_rows,
            self.graph_steps,
        )


COUNTERS = StepCounters()
count_a4_step = COUNTERS.count_a4_step
count_graph_step = COUNTERS.count_graph_step
snapshot = COUNTERS.snapshot


@functools.cache
def _is_first_rank() -> bool:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    try:
        # Every pipeline stage sees the same rows; the metrics of all processes are summed.
        return not (get_tp_group().rank_in_group or get_pp_group().rank_in_group)
    except AssertionError:  # no group: a test, or a tool
        return True


@functools.cache
def _prometheus() -> dict[str, Any]:
    from prometheus_client import Counter

    return {
        "prefill": Counter(
            "vllm:b12x_a4_prefill_rows", "Prefill rows that ran with NVFP4 activations."
        ),
        "graph": Counter(
            "vllm:b12x_a4_graph_rows", "Prefill rows that a CUDA graph replay ran W4A16."
        ),
    }
