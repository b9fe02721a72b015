# SPDX-License-Identifier: Apache-2.0
"""Timing on a GPU: interleaved repetitions, medians with quartiles, one table per benchmark."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements, in microseconds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> Spread:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:8.1f} [{self.low:.1f}, {self.high:.1f}]"


def device_time(
    variants: Mapping[str, Callable[[], None]], *, calls: int = 10, repetitions: int = 21
) -> dict[str, Spread]:
    """Microseconds per call between two CUDA events around *calls* calls; variants take turns in every repetition.

    A device-wide filler kernel goes first, so that the host is ahead when the first event is reached.
    """
    for variant in variants.values():
        for _ in range(3):
            variant()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, variant in variants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            start.record()
            for _ in range(calls):
                variant()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: Spread.of(values) for name, values in samples.items()}


def host_time(
    variants: Mapping[str, Callable[[], None]], *, calls: int = 200, repetitions: int = 11
) -> dict[str, Spread]:
    """Microseconds of host time per call, with the device kept busy so that no call waits for it."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, variant in variants.items():
            variant()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                variant()
            samples[name].append((time.perf_counter() - start) * 1e6 / calls)
            torch.cuda.synchronize()
    return {name: Spread.of(values) for name, values in samples.items()}


def graph_of(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, which is made once before on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def versions() -> str:
    """One line: device and versions, for the head of a report."""
    import triton

    name = torch.cuda.get_device_name()
    python = sys.version.split()[0]
    return f"{name}, Python {python}, torch {torch.__version__}, Triton {triton.__version__}"
