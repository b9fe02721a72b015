# SPDX-License-Identifier: Apache-2.0
"""The stream operations that the prefetch needs, in one place so that tests can record them instead."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class StreamOps(Protocol):
    """Streams and events of one device. Streams and events are opaque to the caller."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def main(self) -> Any:
        """The current stream."""

    def side(self) -> Any:
        """The stream on which prefetched expansions run."""

    def raise_main(self) -> Any:
        """Continue the current stream's work on one of higher priority; what `lower_main` takes."""

    def lower_main(self, before: Any) -> None:
        """Go back to the stream that was current before `raise_main`, ordered after everything on the raised one."""

    def new_event(self) -> Any:
        """An event that can be recorded again and again."""

    def record(self, event: Any, stream: Any) -> None:
        """Record *event* after everything queued on *stream* so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is queued on *stream* from now on wait for the last recording of *event*."""


class CudaStreams:
    """`StreamOps` of a CUDA device. Streams are made on first use, outside any capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        self._raised: torch.cuda.Stream | None = None

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def side(self) -> torch.cuda.Stream:
        if self._side is None:
            # Default priority, which is the lowest there is: the expansion fills gaps of the main stream's work.
            self._side = torch.cuda.Stream(self._device)
        return self._side

    def raise_main(self) -> torch.cuda.Stream:
        before = torch.cuda.current_stream(self._device)
        if self._raised is None:
            self._raised = torch.cuda.Stream(self._device, priority=-1)
        self._raised.wait_stream(before)
        torch.cuda.set_stream(self._raised)
        return before

    def lower_main(self, before: torch.cuda.Stream) -> None:
        assert self._raised is not None
        before.wait_stream(self._raised)
        torch.cuda.set_stream(before)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)


class HostStreams:
    """`StreamOps` of a CPU device: work is done when it is called, so there is nothing to order."""

    def capturing(self) -> bool:
        return False

    def main(self) -> None:
        return None

    side = main
    raise_main = main

    def lower_main(self, before: None) -> None:
        pass

    def new_event(self) -> None:
        return None

    def record(self, event: None, stream: None) -> None:
        pass

    def wait(self, stream: None, event: None) -> None:
        pass


def stream_ops(device: torch.device) -> StreamOps:
    """The stream operations of *device*."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
