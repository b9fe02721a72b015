# SPDX-License-Identifier: Apache-2.0
"""How much of the expansion the prefetch hides, in eager steps, through the product's own objects.

A step is a few synthetic layers of GLM-5.3-Flash TP2 size: norm, QKV, rotary-like arithmetic, causal attention, O
projection, all-reduce, router, shared expert, [the layer's scales], routed experts, all-reduce. The device is alone, so
an all-reduce is a kernel of 24 blocks that moves what PCIe 5 would in the stated time (40 GB/s) and waits the time out.
Main tensors are zero unless asked otherwise: with random ones an H200 sits at its power cap, every variant then runs at
another clock, and the spread is as large as the effect.

    hidden = 1 - (with - without) / (serial - without), paired within each repetition

A step has as many layers as GLM-5.3-Flash has MoE layers, because the first one of every pass expands in line: with 42,
at most 98 % can be hidden. Their planes are those of a few different layers in turn, more bytes than the L2 cache holds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
import triton
import triton.language as tl
from nvfp4_csf.expansion import LayerExpansion
from nvfp4_csf.prefetch import ScaleScratch
from nvfp4_csf.streams import CudaStreams
from triton.language.extra.cuda import globaltimer

from gpu.layers import Layer, glm, make_layers, scratch_of
from gpu.timing import Spread, versions

LAYERS = 42
DIFFERENT = 4
BLOCKS = 24


@triton.jit
def _pause(source, target, words, nanoseconds, BLOCK: tl.constexpr):
    start = globaltimer()
    step = tl.num_programs(0) * BLOCK
    for first in range(tl.program_id(0) * BLOCK, words, step):
        index = first + tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source + index, mask=index < words), mask=index < words)
    while globaltimer() - start < nanoseconds:
        start = start + 0


class Step:
    """The main stream's work of one step of *tokens* tokens with all-reduces of *pause* microseconds (0: none)."""

    def __init__(self, tokens: int, pause: int, *, random: bool = False) -> None:
        make: Callable[..., torch.Tensor] = torch.randn if random else torch.zeros
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.pause = pause
        self.x = make(tokens, 4096, **bf16)
        self.norm = make(4096, **bf16)
        self.qkv, self.o = make(4096, 8192, **bf16), make(4096, 4096, **bf16)
        self.heads = make(1, 32, tokens, 128, **bf16)
        self.cos = make(tokens, 8192, **bf16)
        self.router, self.shared = make(4096, 288, **bf16), make(4096, 2048, **bf16)
        self.up, self.down = make(4096, 2048, **bf16), make(1024, 4096, **bf16)
        self.routed = self.x.repeat(4, 1)
        words = max(1, pause * 10_000)  # 40 GB/s, what an all-reduce over PCIe 5 moves
        self.source = torch.zeros(words, dtype=torch.int32, device="cuda")
        self.target = torch.empty_like(self.source)

    def attention(self) -> torch.Tensor:
        y = F.rms_norm(self.x, (4096,), self.norm) @ self.qkv
        y = y * self.cos + y.roll(64, 1) * self.cos
        F.scaled_dot_product_attention(self.heads, self.heads, self.heads, is_causal=True)
        return y[:, :4096] @ self.o

    def all_reduce(self) -> None:
        if self.pause:
            _pause[(BLOCKS,)](
                self.source,
                self.target,
                self.source.numel(),
                self.pause * 1000,
                BLOCK=4096,
                num_warps=16,
            )

    def route(self, y: torch.Tensor) -> None:
        z = F.rms_norm(y + self.x, (4096,), self.norm)
        (z @ self.router).float().softmax(-1).topk(8)
        h = z @ self.shared
        F.silu(h[:, :1024]) * h[:, 1024:]

    def experts(self) -> None:
        h = self.routed @ self.up
        (F.silu(h[:, :1024]) * h[:, 1024:]) @ self.down


class LaunchAtReduce(ScaleScratch):
    """The other launch point: not the layer's MoE but the last all-reduce before the next one."""

    _reduces = 2  # the MoE's own and the one after attention, as `Variant.run` queues them
    _waiting: Any = None

    def _launch(self, layer: Any, context: Any) -> None:
        self._waiting = [self._reduces, layer, context]

    def before_reduce(self) -> None:
        if self._waiting is not None:
            self._waiting[0] -= 1
            if self._waiting[0] == 0:
                _, layer, context = self._waiting
                super()._launch(layer, context)

    def join(self, context: Any) -> None:
        self._waiting = None
        super().join(context)


class Variant:
    """A way to expand, or not to expand (*layers* empty)."""

    def __init__(
        self,
        name: str,
        layers: list,
        *,
        prefetch: bool = False,
        at_reduce: bool = False,
        raised: bool = False,
    ) -> None:
        self.name = name
        self.main = torch.cuda.Stream()
        self.context: Any = None
        self.owner = (LaunchAtReduce if at_reduce else ScaleScratch)(
            CudaStreams(torch.device("cuda", 0)),
            lambda: self.context,
            prefetch=prefetch,
            raise_above_rows=0 if raised else None,
        )
        self.hooks = [self.owner.add_layer(str(i), layer) for i, layer in enumerate(layers)]
        self.ids = torch.zeros((1024, 8), dtype=torch.int32, device="cuda")

    @contextmanager
    def forward(self) -> Any:
        self.context = SimpleNamespace(
            moe_row_types=SimpleNamespace(num_rows=1024),
            cudagraph_runtime_mode=SimpleNamespace(value=0),
            pending_scales=None,
        )
        self.owner.enter(self.context)
        try:
            yield
        finally:
            if self.context.pending_scales is not None:
                self.context.pending_scales.join(self.context)

    def run(self, step: Step) -> None:
        with self.forward():
            for index in range(LAYERS):
                y = step.attention()
                self.reduce(step)
                step.route(y)
                if self.hooks:
                    self.hooks[index].before(self.ids)
                step.experts()
                if self.hooks:
                    self.hooks[index].after()
                self.reduce(step)

    def reduce(self, step: Step) -> None:
        if isinstance(self.owner, LaunchAtReduce):
            self.owner.before_reduce()
        step.all_reduce()

    def measure(self, step: Step) -> float:
        """Microseconds per layer of one step on this variant's main stream."""
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.main):
            torch.cuda._sleep(4_000_000)  # the host gets ahead
            start.record()
            self.run(step)
            end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / LAYERS


def in_turn(layers: list[Layer]) -> list[LayerExpansion]:
    """The expansions of a whole step."""
    return [layers[index % len(layers)].expansion for index in range(LAYERS)]


def overlap(
    tokens: tuple[int, ...] = (2048, 8192, 32768),
    pauses: tuple[int, ...] = (0, 120, 300),
    *,
    repetitions: int = 9,
    random: bool = False,
) -> None:
    shape = glm(2)
    scratch = scratch_of(shape)
    layers = in_turn(make_layers(shape, DIFFERENT, scratch))
    print(
        f"# share of the expansion that is hidden, {shape.name}, {LAYERS} layers, eager. {versions()}"
    )
    print(
        f"main tensors {'random' if random else 'zero'}; {repetitions} repetitions, median [quartiles]"
    )
    for count in tokens:
        for pause in pauses:
            variants = [
                Variant("without", []),
                Variant("serial", layers),
                Variant("naive: MoE end", layers, prefetch=True),
                Variant("MoE end, main raised", layers, prefetch=True, raised=True),
            ]
            if pause and count <= 8192:
                variants += [
                    Variant("at the all-reduce", layers, prefetch=True, at_reduce=True),
                    Variant(
                        "at the all-reduce, main raised",
                        layers,
                        prefetch=True,
                        at_reduce=True,
                        raised=True,
                    ),
                ]
            _table(
                count,
                pause,
                variants,
                repetitions if count <= 8192 else 3,
                random,
            )


def _table(
    tokens: int, pause: int, variants: list[Variant], repetitions: int, random: bool
) -> None:
    step = Step(tokens, pause, random=random)
    for variant in variants:
        variant.measure(step)
    samples: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for repetition in range(repetitions):
        for variant in variants if repetition % 2 == 0 else reversed(variants):
            samples[variant.name].append(variant.measure(step))
    without, serial = samples["without"], samples["serial"]
    cost = statistics.median(s - w for s, w in zip(serial, without, strict=True))
    print(
        f"{tokens} tokens, all-reduces of {pause} us: {statistics.median(without):.0f} us/layer, "
        f"serial +{cost:.1f} us ({cost / statistics.median(without):.1%})",
        flush=True,
    )
    for name, values in samples.items():
        if name in ("without", "serial"):
            continue
        pairs = list(zip(values, without, strict=True))
        hidden = Spread.of([100 * (1 - (v - w) / cost) for v, w in pairs])
        print(
            f"  {name:32s} hidden {hidden.median:5.0f} % [{hidden.low:.0f}, {hidden.high:.0f}]"
            f"  exposed {statistics.median(v - w for v, w in pairs):5.1f} us/layer",
            flush=True,
        )


class _Nothing:
    """An expansion of next to nothing: what is left is the cost of events, waits and a launch."""

    experts = 8

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, device="cuda")

    def expand(self, stream: torch.cuda.Stream | None = None) -> None:
        with torch.cuda.stream(stream):
            self._word.zero_()


def parts(tokens: int = 2048, repetitions: int = 15) -> None:
    """Where the exposed time of the prefetch goes: with an expansion of nothing, only the streams' own cost is left."""
    shape = glm(2)
    layers = in_turn(make_layers(shape, DIFFERENT, scratch_of(shape)))
    nothing = [_Nothing()] * LAYERS
    print(f"# exposed time by part, {shape.name}, {tokens} tokens. {versions()}")
    for pause in (0, 300):
        variants = [Variant("without", []), Variant("serial", layers)]
        for place in ("MoE end", "all-reduce") if pause else ("MoE end",):
            for what, expansions in (("nothing", nothing), ("expansion", layers)):
                for raised in (False, True):
                    name = f"{what} at {place}{', main raised' if raised else ''}"
                    at_reduce = place == "all-reduce"
                    variants.append(
                        Variant(name, expansions, prefetch=True, at_reduce=at_reduce, raised=raised)
                    )
        _table(tokens, pause, variants, repetitions, False)


COMMANDS = {
    "overlap-parts": parts,
    "overlap": overlap,
    "overlap-random": lambda: overlap(random=True),
}
