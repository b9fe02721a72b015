# SPDX-License-Identifier: Apache-2.0
"""The prefetch on real streams: what every consumer finds in the scratch, with delays where they hurt most.

A consumer is a comparison of the whole scratch with what its layer's scales are, queued where the MoE kernels would be;
it counts wrong bytes on the device. Delays are device-side sleeps: in front of an expansion on the side stream, and on
the main stream.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from csf.kernel_checks import Case
from nvfp4_csf.prefetch import ScaleScratch
from nvfp4_csf.streams import CudaStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = (8, (256, 64), (512, 32))
SLOW = 3_000_000  # about 2 ms


class Delayed:
    """A `LayerExpansion` whose launches on another stream are preceded by a sleep of ``cycles``."""

    def __init__(self, expansion) -> None:
        self._expansion = expansion
        self.experts = expansion.experts
        self.cycles = 0

    def expand(self, stream=None) -> None:
        if self.cycles and stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self.cycles)
        self._expansion.expand(stream)

    def expand_routed(self, topk_ids) -> None:
        self._expansion.expand_routed(topk_ids)


class Model:
    """Layers with different scales over one scratch."""

    def __init__(
        self, layers: int = 4, *, prefetch: bool = True, raise_above: int | None = None
    ) -> None:
        first = Case(SHAPE, "cuda")
        self.scratch = first.scratch
        self.context = None
        self.owner = ScaleScratch(
            CudaStreams(torch.device("cuda", torch.cuda.current_device())),
            lambda: self.context,
            prefetch=prefetch,
            raise_above_rows=raise_above,
        )
        self.wanted, self.expansions, self.hooks = [], [], []
        for index in range(layers):
            case = Case(SHAPE, "cuda", seed=1000 * index, scratch=self.scratch)
            self.wanted.append(case.wanted)
            self.expansions.append(Delayed(case.layer))
            self.hooks.append(self.owner.add_layer(str(index), self.expansions[-1]))
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.ids = torch.zeros((64, 8), dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()

    @contextmanager
    def forward(self, *, prefill: bool = True):
        self.context = SimpleNamespace(
            moe_row_types=SimpleNamespace(num_rows=512) if prefill else None,
            cudagraph_runtime_mode=SimpleNamespace(value=0),
            pending_scales=None,
        )
        self.owner.enter(self.context)
        try:
            yield
        finally:
            if self.context.pending_scales is not None:
                self.context.pending_scales.join(self.context)
            self.context = None

    def consume(self, index: int) -> None:
        for found, wanted in zip(self.scratch, self.wanted[index], strict=True):
            self.wrong += (found != wanted).sum()

    def moe(self, index: int) -> None:
        self.hooks[index].before(self.ids)
        self.consume(index)
        self.hooks[index].after()

    def step(self) -> None:
        with self.forward():
            for index in range(len(self.hooks)):
                self.moe(index)

    def wrong_bytes(self) -> int:
        torch.cuda.synchronize()
        return int(self.wrong)


def test_ahead_and_in_line_give_every_consumer_its_layers_scales() -> None:
    for prefetch in (False, True):
        model = Model(prefetch=prefetch)
        for expansion in model.expansions:
            expansion.cycles = SLOW // 10
        for _ in range(3):
            model.step()
        assert model.wrong_bytes() == 0
        assert model.owner.prefetched == (9 if prefetch else 0)


def test_without_the_wait_consumers_would_find_other_scales(monkeypatch) -> None:
    model = Model()
    monkeypatch.setattr(model.owner, "_wait_ready", lambda stream: None)
    for expansion in model.expansions:
        expansion.cycles = SLOW
    model.step()
    assert model.wrong_bytes() > 0


def _raise_in_the_next_layer_then_replay(model: Model) -> int:
    """Capture a decode graph; raise in layer 1's attention while its expansion is slow; replay at once."""
    graph = torch.cuda.CUDAGraph()
    ids = torch.arange(SHAPE[0], dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        model.hooks[0].before(ids)
        # Time for a late expansion of another layer to come in between, if nothing orders it.
        torch.cuda._sleep(3 * SLOW)
        model.consume(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    model.wrong.zero_()
    model.expansions[1].cycles = SLOW
    with pytest.raises(RuntimeError, match="attention"), model.forward():
        model.moe(0)
        raise RuntimeError("attention")
    graph.replay()
    return model.wrong_bytes()


@pytest.mark.parametrize("raise_above", [None, 256])
def test_an_exception_with_a_slow_side_stream_then_a_graph_replay(raise_above) -> None:
    model = Model(raise_above=raise_above)
    assert _raise_in_the_next_layer_then_replay(model) == 0


def test_without_the_join_that_replay_is_wrong(monkeypatch) -> None:
    model = Model()
    monkeypatch.setattr(ScaleScratch, "join", lambda self, context: None)
    assert _raise_in_the_next_layer_then_replay(model) > 0


def test_capture_with_a_prefetch_pending_waits_for_nothing_outside() -> None:
    model = Model()
    ids = torch.arange(SHAPE[0], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with model.forward():
        model.moe(0)
        assert model.owner.pending
        stream = torch.cuda.Stream()
        # Capturing a wait for an event from outside the graph would raise here.
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            model.hooks[1].before(ids)
            model.consume(1)
            model.hooks[1].after()
        assert model.owner.pending
        model.moe(1)
    for _ in range(3):
        graph.replay()
        model.step()
    assert model.wrong_bytes() == 0


def test_routed_expansion_is_captured_and_reads_the_ids_of_the_replay() -> None:
    case = Case(SHAPE, "cuda")
    for dtype in (torch.int32, torch.int64):
        for count in (4, 40):
            ids = torch.full((count,), -1, dtype=dtype, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                case.layer.expand_routed(ids)
            for experts in ({1, 5}, {0}, set(), {7, 2, 3}):
                ids.fill_(-1)
                ids[: len(experts)] = torch.tensor(sorted(experts), dtype=dtype, device="cuda")
                case.poison()
                graph.replay()
                torch.cuda.synchronize()
                case.expect(experts)


def test_a_raised_pass_has_the_higher_priority_and_ends_where_it_began() -> None:
    model = Model(raise_above=256)
    before = torch.cuda.current_stream()
    with model.forward():
        assert torch.cuda.current_stream().priority < before.priority
        model.moe(0)
        assert model.owner.pending
    assert torch.cuda.current_stream() == before
    with model.forward(prefill=False):
        assert torch.cuda.current_stream() == before
    assert model.wrong_bytes() == 0


@pytest.mark.parametrize("raise_above", [None, 256])
def test_a_thousand_random_passes_with_random_delays(raise_above) -> None:
    model = Model(5, raise_above=raise_above)
    rng = random.Random(11)
    graph = torch.cuda.CUDAGraph()
    ids = torch.arange(SHAPE[0], dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        for index in range(5):
            model.hooks[index].before(ids)
            model.consume(index)
    model.wrong.zero_()
    for _ in range(1000):
        if rng.random() < 0.2:
            graph.replay()
            continue
        try:
            with model.forward(prefill=rng.random() < 0.8):
                for index in range(5):
                    model.expansions[index].cycles = rng.choice((0, 0, 1_000, 30_000, 100_000))
                    if rng.random() < 0.3:
                        torch.cuda._sleep(rng.choice((1_000, 20_000, 80_000)))
                    if rng.random() < 0.03:
                        raise KeyError
                    model.moe(index)
        except KeyError:
            pass
        assert not model.owner.pending
    assert model.owner.prefetched > 500
    assert model.wrong_bytes() == 0
