# SPDX-License-Identifier: Apache-2.0
"""Who writes the shared scale scratch, when: in line before a MoE call, or ahead of it on a side stream.

All layers of one model expand their scales into one scratch. `ScaleScratch` owns it. Every MoE call of a layer goes
through that layer's `LayerScales`: ``before`` makes the scratch hold the layer's scales, ``after`` may start the next
layer's expansion on a side stream, ordered after this layer's kernels, so that it runs beside the next layer's
attention. The rules, each with a test that fails without it:

1. A prefetch serves one call: that of the next layer, in the same forward pass (the same ``ForwardContext``).
2. Nothing is pending before the expansion has really been launched.
3. What is pending when its forward context closes, normally or by an exception, is joined to the main stream there.
   A graph replay runs no Python of ours and writes the same scratch, so nothing may be left for later.
4. Whatever is pending is waited for before anything else touches the scratch, even if it turns out to be of no use.
5. Only eager steps with prefill rows whose calls expand all experts. Decode-only steps are left alone.
6. Under capture nothing is launched ahead, nothing from outside the graph is waited for, and nothing pending is
   touched: the graph expands in line.

A scratch belongs to one model: a draft model makes its own `ScaleScratch`, and with it its own side stream and events.

Priority. A side stream cannot rank below vLLM's main stream, which has the lowest priority there is, and at equal
priority the expansion takes the device in turns with the main stream's kernels and hides little. So the main stream is
raised instead, for exactly the passes that prefetch: `enter` moves an eager pass with prefill rows to a stream of
higher priority and `join` moves back. The streams that vLLM has for every model are not demoted by that: collectives run
on the current stream; CUDA graphs are captured and replayed on the stream that they always had; and the shared experts'
stream is used up to VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD rows, above which alone a pass is raised. Some models have
streams of their own inside a pass (DeepSeek-V4's attention, Qwen4-exp's n-gram embedding, Kimi-K3): next to a raised
main stream they run at a disadvantage that nobody has measured; VLLM_B12X_CSF_RAISE_MAIN_STREAM=0 is for them.

Launch point. The expansion starts when the layer's MoE ends, so that with tensor parallelism it first meets the MoE's
all-reduce, which leaves most of the device idle. Starting at the all-reduce after attention instead was measured and hid
no more (README, "Next-layer prefetch").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .streams import StreamOps

EXPAND_ALL_IDS_PER_EXPERT = 4
"""A call with this many ids per expert expands all of them; with uniform routing 98 % are named anyway."""


class Expansion(Protocol):
    """What `expansion.LayerExpansion` does for one layer."""

    experts: int

    def expand(self, stream: Any = None) -> None: ...
    def expand_routed(self, topk_ids: torch.Tensor) -> None: ...


class PassContext(Protocol):
    """What is used of vLLM's ``ForwardContext``; the patches give it the first and the last field."""

    moe_row_types: Any
    cudagraph_runtime_mode: Any
    pending_scales: Any


@dataclass(frozen=True, eq=False)
class _Pending:
    """An expansion that was launched ahead and that no one has waited for."""

    layer: LayerScales
    context: PassContext
    main: Any


class LayerScales:
    """One layer's compressed scales: the hooks around its MoE calls. Made by `ScaleScratch.add_layer`."""

    def __init__(self, owner: ScaleScratch, name: str, expansion: Expansion) -> None:
        self.owner = owner
        self.name = name
        self.expansion = expansion
        self.next: LayerScales | None = None
        self.expands_all = False
        """Whether the last call's scratch held all experts."""

    def before(self, topk_ids: torch.Tensor, split: Any = None) -> None:
        """Make the scratch hold this layer's scales of the experts in *topk_ids* (int32 or int64, contiguous)."""
        self.owner._before(self, topk_ids)

    def after(self, split: Any = None) -> None:
        """The call's kernels are queued; also called while an exception leaves the call."""
        self.owner._after(self)


class ScaleScratch:
    """The scratch of one model on one device, and the order in which its layers write it.

    Args:
        streams: stream operations of the device.
        context: returns the current forward context, or None.
        prefetch: whether to expand ahead at all.
        raise_above_rows: passes of more rows run on a raised main stream; None: never.

    Layers are added in the order in which the model runs them. All calls come from one thread.
    """

    def __init__(
        self,
        streams: StreamOps,
        context: Callable[[], PassContext | None],
        *,
        prefetch: bool = True,
        raise_above_rows: int | None = None,
    ) -> None:
        self._streams = streams
        self._context = context
        self._prefetch = prefetch
        self._raise_above_rows = raise_above_rows
        self._layers: list[LayerScales] = []
        self._pending: _Pending | None = None
        self._raised: tuple[PassContext, Any] | None = None
        self._events: tuple[Any, Any] | None = None
        self.prefetched = 0
        """Calls that found their scales expanded ahead."""
        self.expanded = 0
        """Calls that expanded in line, captured ones included."""

    def add_layer(self, name: str, expansion: Expansion) -> LayerScales:
        """The hooks of the layer that runs after those added so far."""
        layer = LayerScales(self, name, expansion)
        if self._layers:
            self._layers[-1].next = layer
        self._layers.append(layer)
        return layer

    @property
    def pending(self) -> bool:
        """Whether an expansion has been launched ahead that no one has waited for."""
        return self._pending is not None

    def enter(self, context: PassContext) -> None:
        """*context* opens: raise the main stream if its pass will prefetch."""
        rows = context.moe_row_types
        if not self._prefetch or self._raise_above_rows is None or rows is None:
            return
        if rows.num_rows <= self._raise_above_rows or context.cudagraph_runtime_mode.value:
            return
        if self._raised is not None or self._streams.capturing():
            return
        context.pending_scales = self
        self._raised = context, self._streams.raise_main()

    def join(self, context: PassContext) -> None:
        """*context* closes: everything queued from now on comes after what its pass left pending."""
        context.pending_scales = None
        pending = self._pending
        if pending is not None and pending.context is context:
            self._pending = None
            self._wait_ready(pending.main)
            current = self._streams.main()  # another one where an exception left a stream context
            if current != pending.main:
                self._wait_ready(current)
        if self._raised is not None and self._raised[0] is context:
            before, self._raised = self._raised[1], None
            self._streams.lower_main(before)

    def _before(self, layer: LayerScales, topk_ids: torch.Tensor) -> None:
        if self._streams.capturing():
            self._expand(layer, topk_ids)
            return
        pending = self._pending
        if pending is not None:
            self._pending = None
            self._wait_ready(self._streams.main())
            if pending.layer is layer and pending.context is self._context():
                layer.expands_all = True
                self.prefetched += 1
                return
        self._expand(layer, topk_ids)

    def _expand(self, layer: LayerScales, topk_ids: torch.Tensor) -> None:
        layer.expands_all = topk_ids.numel() >= EXPAND_ALL_IDS_PER_EXPERT * layer.expansion.experts
        if layer.expands_all:
            layer.expansion.expand()
        else:
            layer.expansion.expand_routed(topk_ids)
        self.expanded += 1

    def _after(self, layer: LayerScales) -> None:
        if not self._prefetch or layer.next is None or not layer.expands_all:
            return
        if sys.exc_info()[0] is not None or self._streams.capturing():
            return
        context = self._context()
        if context is None or context.moe_row_types is None:
            return
        if context.pending_scales is not self:
            if context.pending_scales is not None:
                return  # another model's layers run in this very context
            context.pending_scales = self  # from here on its end is reported to `join`
        self._launch(layer.next, context)

    def _launch(self, layer: LayerScales, context: PassContext) -> None:
        streams = self._streams
        main, side = streams.main(), streams.side()
        start, ready = self._event_pair()
        streams.record(start, main)
        streams.wait(side, start)
        try:
            layer.expansion.expand(side)
        except BaseException:
            streams.record(ready, side)
            streams.wait(main, ready)
            raise
        streams.record(ready, side)
        self._pending = _Pending(layer, context, main)

    def _wait_ready(self, stream: Any) -> None:
        self._streams.wait(stream, self._event_pair()[1])

    def _event_pair(self) -> tuple[Any, Any]:
        # One pair for good: a wait refers to the recording before it, and there is never more than one pending.
        if self._events is None:
            self._events = self._streams.new_event(), self._streams.new_event()
        return self._events
