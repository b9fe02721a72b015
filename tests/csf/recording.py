# SPDX-License-Identifier: Apache-2.0
"""Streams that are only written down, and a checker that says whether a log of them could go wrong on a device.

`RecordingStreams` implements `nvfp4_csf.streams.StreamOps`. Operations on streams carry vector clocks, as a race
detector does: an operation happens before another if a chain of stream order and event waits leads from one to the
other. Every write and read of the scratch is checked against the ones before it, so a missing wait is an error however
the device would have timed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two accesses to the scratch that no wait orders."""


@dataclass
class Access:
    what: str
    stream: str
    clock: Clock


@dataclass
class RecordingStreams:
    """Two streams, ``main`` and ``side``, and their events."""

    current: str = "main"
    is_capturing: bool = False
    log: list[str] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=lambda: {"main": {}, "side": {}})
    waits_in_capture: int = 0

    def capturing(self) -> bool:
        return self.is_capturing

    def main(self) -> str:
        return self.current

    def side(self) -> str:
        return "side"

    def raise_main(self) -> str:
        before, self.current = self.current, "raised"
        self.log.append("raise")
        self._order("raised", before)
        return before

    def lower_main(self, before: str) -> None:
        self.log.append("lower")
        self._order(before, "raised")
        self.current = before

    def _order(self, after: str, before: str) -> None:
        clock = self.clocks.setdefault(after, {})
        for name, tick in self.clocks.setdefault(before, {}).items():
            clock[name] = max(clock.get(name, 0), tick)

    def new_event(self) -> SimpleNamespace:
        return SimpleNamespace(clock=None)

    def record(self, event: SimpleNamespace, stream: str) -> None:
        self.log.append(f"record on {stream}")
        event.clock = dict(self.clocks[stream])

    def wait(self, stream: str, event: SimpleNamespace) -> None:
        assert event.clock is not None, "a wait for an event that was never recorded"
        if self.is_capturing:
            self.waits_in_capture += 1
        self.log.append(f"{stream} waits")
        clock = self.clocks.setdefault(stream, {})
        for name, tick in event.clock.items():
            clock[name] = max(clock.get(name, 0), tick)

    def tick(self, stream: str) -> Clock:
        """A kernel on *stream*: its own clock, after everything it is ordered behind."""
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return dict(clock)


def ordered(before: Access, after: Access) -> bool:
    return after.clock.get(before.stream, 0) >= before.clock[before.stream]


class Scratch:
    """Who wrote the scratch last and who has read it since."""

    def __init__(self, streams: RecordingStreams) -> None:
        self.streams = streams
        self.last_write: Access | None = None
        self.reads: list[Access] = []
        self.holds: str | None = None

    def write(self, layer: str, stream: str, *, whole: bool) -> None:
        access = Access(f"{layer} expands on {stream}", stream, self.streams.tick(stream))
        self.streams.log.append(access.what)
        for other in (self.last_write, *self.reads):
            if other is not None and not ordered(other, access):
                raise RaceError(f"{access.what} beside: {other.what}")
        self.last_write, self.reads = access, []
        self.holds = layer if whole else f"{layer} (routed)"

    def read(self, layer: str, stream: str) -> None:
        access = Access(f"MoE of {layer} on {stream}", stream, self.streams.tick(stream))
        self.streams.log.append(access.what)
        assert self.last_write is not None, f"{access.what} before any expansion"
        if not ordered(self.last_write, access):
            raise RaceError(f"{access.what} beside: {self.last_write.what}")
        assert self.holds is not None
        held = self.holds.removesuffix(" (routed)")
        assert held == layer, f"{access.what}, but the scratch holds the scales of {held}"
        self.reads.append(access)


class RecordedExpansion:
    """An `Expansion` that writes to a `Scratch`; ``fails`` makes the next launch raise."""

    def __init__(self, name: str, scratch: Scratch, experts: int = 8) -> None:
        self.name, self.scratch, self.experts = name, scratch, experts
        self.fails: BaseException | None = None

    def expand(self, stream: Any = None) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.scratch.write(self.name, stream or self.scratch.streams.current, whole=True)

    def expand_routed(self, topk_ids: torch.Tensor) -> None:
        self.scratch.write(self.name, self.scratch.streams.current, whole=False)


def ids_for(experts: int, *, everyone: bool) -> torch.Tensor:
    """Routed ids of a call that expands all experts, or only the routed ones."""
    return torch.zeros((experts * 4 if everyone else 2, 1), dtype=torch.int32)
