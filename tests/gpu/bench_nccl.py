# SPDX-License-Identifier: Apache-2.0
"""A real NCCL all-reduce beside an expansion, on a main stream of equal and of raised priority; needs two GPUs.

vLLM queues its all-reduces on the current stream, as this does (one process, both GPUs). Alone, the stream's priority
must make no difference; beside an expansion the raised stream shows whether NCCL's blocks get their place first.
"""

from __future__ import annotations

import statistics
import sys

import torch
from torch.cuda import nccl

from gpu.layers import glm, make_layers, scratch_of
from gpu.timing import Spread, versions


def all_reduce(sizes: tuple[int, ...] = (2048, 8192), repetitions: int = 31) -> None:
    if torch.cuda.device_count() < 2:
        print("nccl: skipped, two GPUs are needed", file=sys.stderr)
        return
    devices = (0, 1)
    expansions = []
    for device in devices:
        torch.cuda.set_device(device)
        shape = glm(2)
        expansions.append(make_layers(shape, 1, scratch_of(shape))[0].expansion)
    torch.cuda.set_device(0)
    print(
        f"# all-reduce of tokens x 4096 bf16 over 2 GPUs, us from start to the end of both. {versions()}"
    )
    for tokens in sizes:
        tensors = [
            torch.zeros(tokens * 4096, dtype=torch.bfloat16, device=device) for device in devices
        ]
        for priority in (0, -1):
            for beside in (False, True):
                samples = [
                    _once(tensors, expansions if beside else [], priority)
                    for _ in range(repetitions + 3)
                ][3:]
                reduce = Spread.of([sample[0] for sample in samples])
                both = statistics.median(sample[1] for sample in samples)
                name = f"{tokens} tokens, main {'raised' if priority else 'equal'}, {'beside an expansion' if beside else 'alone'}"
                print(
                    f"{name:55s} all-reduce {reduce} us, all done after {both:.1f} us", flush=True
                )


def _once(tensors: list[torch.Tensor], expansions: list, priority: int) -> tuple[float, float]:
    """Microseconds until the all-reduce, and until everything on the first GPU, is done."""
    streams, events = [], []
    for tensor in tensors:
        with torch.cuda.device(tensor.device):
            torch.cuda.synchronize()
            streams.append(torch.cuda.Stream(priority=priority))
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(3)])
    sides = []
    for index, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
        with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # the host gets ahead on both
            events[index][0].record()
            side = torch.cuda.Stream()
            side.wait_event(events[index][0])
            sides.append(side)
            if expansions:
                expansions[index].expand(side)
    nccl.all_reduce(tensors, streams=streams)
    for index, (stream, tensor) in enumerate(zip(streams, tensors, strict=True)):
        with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
            events[index][1].record()
            stream.wait_stream(sides[index])
            events[index][2].record()
    for tensor in tensors:
        torch.cuda.synchronize(tensor.device)
    start, reduced, done = events[0]
    return start.elapsed_time(reduced) * 1e3, start.elapsed_time(done) * 1e3


COMMANDS = {"nccl": all_reduce}
