# SPDX-License-Identifier: Apache-2.0
"""The rules of the next-layer prefetch, on streams that are only written down (see `recording`)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from csf.recording import RaceError, RecordedExpansion, RecordingStreams, Scratch, ids_for
from nvfp4_csf.prefetch import ScaleScratch

EXPERTS = 8


class Model:
    """A few layers over one scratch, run the way vLLM runs them."""

    def __init__(
        self,
        layers: int = 3,
        *,
        prefetch: bool = True,
        raise_above: int | None = None,
        shared: Model | None = None,
    ) -> None:
        self.context: SimpleNamespace | None = None if shared is None else shared.context
        self.streams = RecordingStreams() if shared is None else shared.streams
        self.scratch = Scratch(self.streams)
        self.owner = ScaleScratch(
            self.streams,
            lambda: self.context,
            prefetch=prefetch,
            raise_above_rows=raise_above,
        )
        self.expansions = [
            RecordedExpansion(f"layer {i}", self.scratch, EXPERTS) for i in range(layers)
        ]
        self.layers = [self.owner.add_layer(e.name, e) for e in self.expansions]

    @contextmanager
    def forward(
        self, *, prefill: bool = True, rows: int = 512, graph: bool = False
    ) -> Iterator[SimpleNamespace]:
        """As ``set_forward_context`` with the patch's lines."""
        outer, self.context = (
            self.context,
            SimpleNamespace(
                moe_row_types=SimpleNamespace(num_rows=rows) if prefill else None,
                cudagraph_runtime_mode=SimpleNamespace(value=int(graph)),
                pending_scales=None,
            ),
        )
        context = self.context
        self.owner.enter(context)
        try:
            yield context
        finally:
            if context.pending_scales is not None:
                context.pending_scales.join(context)
            self.context = outer

    def moe(self, index: int, *, everyone: bool = True, fails: bool = False) -> None:
        layer = self.layers[index]
        layer.before(ids_for(EXPERTS, everyone=everyone))
        try:
            self.scratch.read(layer.name, self.streams.current)
            if fails:
                raise RuntimeError("the MoE failed")
        finally:
            layer.after()

    def step(self, **kwargs) -> None:
        with self.forward(prefill=kwargs.pop("prefill", True)):
            for index in range(len(self.layers)):
                self.moe(index, **kwargs)

    def replay(self) -> None:
        """A graph: every layer expands its routed experts in line, and no Python of ours runs."""
        for layer in self.layers:
            self.scratch.write(layer.name, "main", whole=False)
            self.scratch.read(layer.name, "main")

    @property
    def ahead(self) -> list[str]:
        """Expansions on the side stream so far."""
        return [entry for entry in self.streams.log if "expands on side" in entry]


def test_each_layer_but_the_first_is_expanded_ahead() -> None:
    model = Model()
    model.step()
    assert model.ahead == ["layer 1 expands on side", "layer 2 expands on side"]
    assert (model.owner.prefetched, model.owner.expanded) == (2, 1)
    assert not model.owner.pending


def test_the_log_of_a_step() -> None:
    model = Model(2)
    model.step()
    assert model.streams.log == [
        "layer 0 expands on main",
        "MoE of layer 0 on main",
        "record on main",
        "side waits",
        "layer 1 expands on side",
        "record on side",
        "main waits",
        "MoE of layer 1 on main",
    ]


def test_turned_off_nothing_runs_ahead() -> None:
    model = Model(prefetch=False)
    model.step()
    assert model.ahead == []
    assert model.owner.expanded == 3


def test_decode_only_steps_start_nothing() -> None:
    model = Model()
    model.step(prefill=False)
    model.step(prefill=False, everyone=False)
    assert model.ahead == []


def test_calls_that_expand_routed_experts_start_nothing() -> None:
    model = Model()
    model.step(everyone=False)
    assert model.ahead == []


def test_without_a_forward_context_nothing_is_started() -> None:
    model = Model()
    for index in range(3):
        model.moe(index)
    assert model.ahead == []


def test_a_prefetch_of_another_pass_costs_a_wait_and_is_dropped() -> None:
    model = Model()
    with model.forward() as first:
        model.moe(0)
        first.pending_scales = None  # the close is missed: what rule 1 and rule 4 are for
    assert model.owner.pending
    with model.forward():
        model.moe(1)
        assert model.owner.prefetched == 0
        assert model.owner.expanded == 2


def test_a_prefetch_serves_only_the_layer_it_was_made_for() -> None:
    model = Model()
    with model.forward():
        model.moe(0)
        model.moe(2)
        assert model.owner.prefetched == 0


def test_a_second_call_of_a_layer_expands_again() -> None:
    model = Model()
    with model.forward():
        model.moe(0)
        model.moe(0)
        model.moe(1)
    assert model.owner.prefetched == 1


def test_what_is_pending_is_joined_when_the_context_closes() -> None:
    model = Model()
    with model.forward():
        model.moe(0)
    assert not model.owner.pending
    model.replay()


def test_an_exception_in_the_next_layer_leaves_nothing_pending() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="attention failed"), model.forward():
        model.moe(0)
        raise RuntimeError("attention failed")
    assert not model.owner.pending
    model.replay()


def test_an_exception_inside_another_stream_is_joined_there_too() -> None:
    model = Model()
    with pytest.raises(RuntimeError), model.forward():
        model.streams.clocks["other"] = dict(model.streams.clocks["main"])
        model.moe(0)
        model.streams.current = "other"
        raise RuntimeError
    model.scratch.write("graph", "other", whole=True)
    model.streams.current = "main"
    model.streams.clocks["main"].update(model.streams.clocks["other"])
    model.replay()


def test_a_failed_moe_starts_nothing() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="the MoE failed"), model.forward():
        model.moe(0, fails=True)
    assert model.ahead == []


def test_nothing_is_published_when_the_launch_fails() -> None:
    model = Model()
    with model.forward():
        model.expansions[1].fails = RuntimeError("no launch")
        with pytest.raises(RuntimeError, match="no launch"):
            model.moe(0)
        assert not model.owner.pending
        model.moe(1)
        assert model.owner.prefetched == 0
    with model.forward():
        model.moe(0)
        model.moe(1)
    assert model.owner.prefetched == 1
    model.replay()


def test_work_of_a_failed_launch_is_ordered_before_what_follows() -> None:
    model = Model()

    class HalfLaunched(RecordedExpansion):
        def expand(self, stream=None):
            super().expand(stream)
            raise RuntimeError("after the kernel was queued")

    model.layers[1].expansion = HalfLaunched("layer 1", model.scratch, EXPERTS)
    with pytest.raises(RuntimeError, match="queued"), model.forward():
        model.moe(0)
    model.replay()


def test_under_capture_everything_is_in_line_and_nothing_outside_is_waited_for() -> None:
    model = Model()
    model.streams.is_capturing = True
    model.step()
    assert model.ahead == []
    assert model.streams.waits_in_capture == 0


def test_capture_does_not_touch_what_is_pending() -> None:
    model = Model()
    with model.forward():
        model.moe(0)
        # A capture on a stream of its own: its kernels do not run now, so they race with nothing.
        model.streams.is_capturing = True
        model.layers[1].expansion = RecordedExpansion("layer 1", Scratch(model.streams), EXPERTS)
        model.layers[1].before(ids_for(EXPERTS, everyone=True))
        model.layers[1].after()
        assert model.streams.waits_in_capture == 0
        assert model.owner.pending
        model.streams.is_capturing = False
    assert not model.owner.pending
    model.replay()


def test_draft_and_target_have_their_own_scratch_and_state() -> None:
    target, draft = Model(), Model(2)
    draft.streams = target.streams
    with target.forward():
        target.moe(0)
        with draft.forward():
            draft.moe(0)
            draft.moe(1)
        target.moe(1)
    assert target.owner.prefetched == 1
    assert draft.owner.prefetched == 1


def test_two_models_in_one_context_do_not_prefetch_over_each_other() -> None:
    target = Model()
    draft = Model(2)
    with target.forward() as context:
        target.moe(0)
        draft.context = context
        draft.moe(0)
        draft.moe(1)
        assert context.pending_scales is target.owner
        assert draft.owner.prefetched == 0
    assert not target.owner.pending


def test_a_pass_that_prefetches_runs_on_the_raised_stream() -> None:
    model = Model(2, raise_above=256)
    model.replay()
    model.step()
    assert model.streams.log[4:] == [
        "raise",
        "layer 0 expands on raised",
        "MoE of layer 0 on raised",
        "record on raised",
        "side waits",
        "layer 1 expands on side",
        "record on side",
        "raised waits",
        "MoE of layer 1 on raised",
        "lower",
    ]
    assert model.streams.current == "main"
    model.replay()


def test_other_passes_stay_where_they_are() -> None:
    model = Model(2, raise_above=256)
    for kwargs in ({"prefill": False}, {"rows": 256}, {"graph": True}):
        with model.forward(**kwargs):
            model.moe(0)
    model.streams.is_capturing = True
    with model.forward():
        model.moe(0)
    assert "raise" not in model.streams.log
    off = Model(2, raise_above=256, prefetch=False)
    off.step()
    never = Model(2)
    never.step()
    assert "raise" not in off.streams.log + never.streams.log


def test_a_raised_pass_ends_on_the_main_stream_after_an_exception() -> None:
    model = Model(2, raise_above=256)
    with pytest.raises(RuntimeError), model.forward():
        model.moe(0)
        raise RuntimeError
    assert model.streams.current == "main"
    assert not model.owner.pending
    model.replay()
    model.step()


def test_a_nested_pass_is_not_raised_twice_and_lowers_nothing() -> None:
    model = Model(2, raise_above=256)
    with model.forward():
        with model.forward():
            model.moe(0)
        assert model.streams.current == "raised"
        model.moe(0)
        model.moe(1)
    assert model.streams.log.count("raise") == model.streams.log.count("lower") == 1
    assert model.owner.prefetched == 1


@pytest.mark.parametrize("raise_above", [None, 256])
def test_random_passes_never_race(raise_above) -> None:
    rng = random.Random(7)
    model = Model(5, raise_above=raise_above)
    for _ in range(1000):
        kind = rng.random()
        if kind < 0.2:
            model.replay()
            continue
        try:
            with model.forward(prefill=rng.random() < 0.8, rows=rng.choice((8, 512))):
                for index in range(len(model.layers)):
                    if rng.random() < 0.03:
                        raise KeyError("attention")
                    if rng.random() < 0.02:
                        model.expansions[index].fails = KeyError("launch")
                    model.moe(index, everyone=rng.random() < 0.8, fails=rng.random() < 0.03)
        except (KeyError, RuntimeError):
            pass
        for expansion in model.expansions:
            expansion.fails = None
        assert not model.owner.pending
    assert model.owner.prefetched > 300


def test_the_checker_sees_a_missing_wait() -> None:
    model = Model()
    with model.forward() as context:
        model.moe(0)
        context.pending_scales = None
    with pytest.raises(RaceError):
        model.replay()
