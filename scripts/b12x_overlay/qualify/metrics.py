# SPDX-License-Identifier: Apache-2.0
"""The server's Prometheus metrics, reduced to the counters that a measurement needs.

Names are those of vLLM 0.33.0 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py). Every counter is summed
over engines. ``vllm:iteration_tokens_total`` is observed once per engine step that returned tokens, so its count is
the number of steps; with several API server processes each counts the steps it saw.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.promises import A4_MISSED_ROWS, A4_ROWS

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generated",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:prompt_tokens_total": "prompted",
    "vllm:prompt_tokens_cached_total": "cached_prompt",
    "process_start_time_seconds": "started",
    A4_ROWS: "a4_rows",
    A4_MISSED_ROWS: "a4_missed_rows",
}


@dataclass(frozen=True)
class Counters:
    """One look at the server's counters; None where it has no such metric."""

    at: float
    """time.perf_counter() in the middle of the request."""
    took: float = 0.0
    """Seconds that the request took: the counters are from some moment in it."""
    running: float | None = None
    waiting: float | None = None
    generated: float | None = None
    steps: float | None = None
    drafts: float | None = None
    accepted: float | None = None
    prompted: float | None = None
    cached_prompt: float | None = None
    started: float | None = None
    a4_rows: float | None = None
    a4_missed_rows: float | None = None

    @property
    def idle(self) -> bool | None:
        """Whether no request runs or waits; None without the gauges."""
        if self.running is None:
            return None
        return self.running + (self.waiting or 0) == 0


def parse(text: str, at: float, took: float = 0.0) -> Counters:
    """Read the Prometheus text format.

    Raises:
        Fault: BAD_BODY for what is not that format.
    """
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                field = _NAMES.get(sample.name)
                if field is None:
                    continue
                sums[field] = (
                    max(sums.get(field, 0), sample.value)
                    if field == "started"
                    else sums.get(field, 0) + sample.value
                )
    except ValueError as error:
        raise Fault(
            FaultKind.BAD_BODY, f"/metrics is not in Prometheus' text format: {error}"
        ) from error
    return Counters(at, took, **sums)


async def scrape(client: Client) -> Counters:
    """Fetch and read /metrics. Raises `Fault`."""
    before = time.perf_counter()
    text = await client.get_text("/metrics")
    after = time.perf_counter()
    return parse(text, (before + after) / 2, after - before)


async def try_scrape(client: Client, available: bool) -> Counters | None:
    """As `scrape`, None where the server has no metrics or fails to give them."""
    if not available:
        return None
    try:
        return await scrape(client)
    except Fault:
        return None


def increase(before: float | None, after: float | None) -> float | None:
    """Growth of a counter; None where unknown or where it went back (the server was restarted)."""
    if before is None or after is None or after < before:
        return None
    return after - before


def grown(before: float | None, after: float | None) -> float | None:
    """As `increase` for a counter that appears with its first count."""
    return after if before is None else increase(before, after)
