# SPDX-License-Identifier: Apache-2.0
"""Expansion and encoding: device time, share of a device copy, host cost, beside the bundled b12x on the same scales."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import torch
from nvfp4_csf import encoder, expansion, planes

from gpu.layers import Shape, glm, make_layers, random_scales, scratch_of
from gpu.timing import Spread, device_time, host_time, versions

COPY_BYTES = 2 << 30


def copy_bandwidth() -> Spread:
    """GB/s of a device-to-device copy of 2 GiB, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    spread = device_time({"copy": lambda: target.copy_(source)}, calls=3)["copy"]
    return Spread(*(2 * COPY_BYTES / t / 1e3 for t in (spread.median, spread.high, spread.low)))


def in_turn(*calls: Callable[[], None]) -> Callable[[], None]:
    """A function that makes the next of *calls* each time, so that no layer's planes stay in the L2 cache."""
    cycle = itertools.cycle(calls)

    def call() -> None:
        next(cycle)()

    return call


def bundled(layers: list, scratch: tuple) -> list:
    """The bundled b12x's decoder over the same scales, or an empty list where it is not installed."""
    try:
        from b12x._lib.quant import nvfp4_csf as theirs
    except ImportError as error:
        print(f"bundled b12x not measured: {error}", file=sys.stderr)
        return []
    decoders = []
    for layer in layers:
        batches = []
        for plane in (layer.w13, layer.w2):
            streams = planes.streams(plane)
            batches.append(
                theirs.make_nvfp4_csf_batch(
                    [s.fixed for s in streams], [s.exceptions for s in streams],
                    rows=plane.geometry.rows, columns=plane.geometry.columns, device="cuda",
                )
            )  # fmt: skip
        decoders.append(theirs.Nvfp4CsfDecoder.prepare(*batches, *scratch))
    return decoders


def same_bytes(layer: object, decoder: object, scratch: tuple) -> bool:
    """Whether both expanders write the same bytes over different poison."""
    found = []
    for poison, run in (
        (0x11, layer.expansion.expand),
        (0xEE, lambda: decoder.decode_all(*scratch)),
    ):
        for plane in scratch:
            plane.view(torch.uint8).fill_(poison)
        run()
        found.append([plane.view(torch.uint8).clone() for plane in scratch])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def expand(shapes: list[Shape], count: int = 2) -> None:
    copy = copy_bandwidth()
    print(f"# expand, all experts, one launch. {versions()}")
    print(f"2 GiB device copy: {copy.median:.0f} GB/s [{copy.low:.0f}, {copy.high:.0f}]")
    for shape in shapes:
        scratch = scratch_of(shape)
        layers = make_layers(shape, count, scratch)
        variants = {"this": in_turn(*(layer.expansion.expand for layer in layers))}
        decoders = bundled(layers, scratch)
        if decoders:
            variants["bundled decode_all"] = in_turn(
                *(partial(d.decode_all, *scratch) for d in decoders)
            )
            print(
                f"{shape.name}: same bytes as the bundled decoder: {same_bytes(layers[0], decoders[0], scratch)}"
            )
        moved = layers[0].bytes_moved
        variants["copy of as many bytes"] = in_turn(*copies(moved))
        report(shape, moved, copy.median, device_time(variants), host_time(variants))


def copies(moved: int) -> list[Callable[[], None]]:
    """Device copies that read and write *moved* bytes together, from two sources in turn as two layers are."""
    sources = torch.empty((2, moved // 2), dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(sources[0])
    return [partial(target.copy_, source) for source in sources]


def report(shape: Shape, moved: int, copy: float, device: dict, host: dict) -> None:
    for name, spread in device.items():
        rate = moved / spread.median / 1e3
        print(
            f"{shape.name:20s} {name:21s} {spread} us  {moved / 1e6:6.1f} MB  {rate:5.0f} GB/s  "
            f"{rate / copy:.3f} of 2 GiB copy  host {host[name]} us/launch",
            flush=True,
        )


def encode(shapes: list[Shape]) -> None:
    print(f"# encode, both planes of a layer, host sync included. {versions()}")
    for shape in shapes:
        generator = torch.Generator("cuda").manual_seed(0)
        scales = [random_scales(shape.experts, *size, generator) for size in (shape.w13, shape.w2)]
        encoder.encode(scales[0]), encoder.encode(scales[1])
        samples = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for plane in scales:
                encoder.encode(plane)
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) * 1e6)
        spread = Spread.of(samples)
        print(
            f"{shape.name:20s} {spread} us  {shape.plain_bytes / spread.median / 1e3:6.1f} GB/s of scales",
            flush=True,
        )


def routed(shape: Shape) -> None:
    print(f"# expand_routed, distinct random ids. {shape.name}")
    scratch = scratch_of(shape)
    layers = make_layers(shape, 3, scratch)
    variants = {"all": in_turn(*(layer.expansion.expand for layer in layers))}
    for count in (1, 8, 64, 256, 288, 320, 576, 1152, 2304):
        ids = torch.randint(0, shape.experts, (count,), dtype=torch.int32, device="cuda")
        variants[f"{count} ids"] = in_turn(
            *(partial(layer.expansion.expand_routed, ids) for layer in layers)
        )
    host = host_time({k: variants[k] for k in ("all", "8 ids")})
    for name, spread in device_time(variants).items():
        print(
            f"{name:12s} {spread} us" + (f"  host {host[name]} us" if name in host else ""),
            flush=True,
        )


def sweep(shape: Shape) -> None:
    """Tile size, warps and exceptions per load; the product's constants come from here."""
    copy = copy_bandwidth()
    scratch = scratch_of(shape)
    base = make_layers(shape, 3, scratch)
    variants = {}
    for words, warps, exceptions in itertools.product((1024, 2048, 4096, 8192), (4, 8), (128, 256)):
        if not 4 <= words // (32 * warps) <= 32:
            continue
        expansion.TILE_WORDS, expansion.WARPS, expansion.EXCEPTIONS_PER_LOAD = (
            words,
            warps,
            exceptions,
        )
        made = [expansion.LayerExpansion(layer.w13, layer.w2, *scratch).expand for layer in base]
        variants[f"words {words} warps {warps} exceptions {exceptions}"] = in_turn(*made)
    moved = base[0].bytes_moved
    for name, spread in sorted(device_time(variants).items(), key=lambda item: item[1].median):
        print(
            f"{shape.name} {name:40s} {spread} us  {moved / spread.median / 1e3 / copy.median:.3f} of copy",
            flush=True,
        )


COMMANDS = {
    "expand": lambda: expand([glm(tp) for tp in (1, 2, 4, 8)]),
    "encode": lambda: encode([glm(tp) for tp in (1, 2, 4, 8)]),
    "routed": lambda: routed(glm(2)),
    "sweep": lambda: [sweep(glm(tp)) for tp in (2, 8)],
}
