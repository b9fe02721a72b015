# SPDX-License-Identifier: Apache-2.0
"""Expands the compressed scales of one layer into the scratch that all layers of a model share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .expand_kernels import expand_all, expand_routed
from .launch import PrebuiltLaunch, interpreted
from .planes import PlaneGeometry, ScalePlanes, expand

WARPS = 8
TILE_WORDS = 1024
"""32-bit words of code bytes per program at most: 4 KiB read, 8 KiB written. The best of 512 to 8192 on an H200."""
EXCEPTIONS_PER_LOAD = 128
IDS_PER_LOAD = 256


@dataclass(frozen=True)
class Tiling:
    """How a plane is cut into tiles, one per program; see `expand_kernels`."""

    slabs: int
    parts: int
    chunks: int
    tiles: int
    """Tiles per expert."""


def tiling(geometry: PlaneGeometry, words: int) -> Tiling:
    """The tiling with the largest step of at most *words* 32-bit words of code bytes, then with the smallest tile.

    A step is what a program loads at once, ``slabs * chunks`` chunks; both must be powers of two. Where a slab has a
    power of two of chunks a tile is one step; otherwise it takes several.
    """
    chunk = 128 if geometry.columns % 8 == 0 else 64
    per_slab = 16 * geometry.columns // chunk

    def candidates() -> Iterator[tuple[int, int, Tiling]]:
        for parts in (p for p in range(1, per_slab + 1) if per_slab % p == 0):
            per_part = per_slab // parts
            chunks = per_part & -per_part
            for slabs in (1, 2, 4, 8, 16) if parts == 1 else (1,):  # a part lies within a slab
                if geometry.slabs % slabs == 0:
                    tiles = geometry.slabs // slabs * parts
                    yield (
                        slabs * chunks * chunk,
                        slabs * per_part,
                        Tiling(slabs, parts, chunks, tiles),
                    )

    fitting = [found for found in candidates() if found[0] <= words]
    if not fitting:
        return min(candidates(), key=lambda found: found[:2])[2]
    return max(fitting, key=lambda found: (found[0], -found[1]))[2]


def constants(w13: PlaneGeometry, w2: PlaneGeometry) -> list[int]:
    """The kernels' common constants for planes of these geometries, in their order."""
    tiles = [tiling(geometry, TILE_WORDS) for geometry in (w13, w2)]
    values = [tile.tiles for tile in tiles]
    for geometry, tile in zip((w13, w2), tiles, strict=True):
        values += [geometry.rows, geometry.columns, tile.slabs, tile.parts, tile.chunks]
    return [*values, EXCEPTIONS_PER_LOAD]


class LayerExpansion:
    """The planes of one layer and the scratch they expand into.

    Args:
        w13, w2: planes of both projections, same device and number of experts.
        scratch13, scratch2: ``[E, R, C]`` of one byte per element, contiguous, in F8_128x4 order once expanded.

    Every call enqueues one launch on the current stream and returns; nothing is read back, nothing is allocated, so
    calls may be captured. Tensors are kept by address: replace their contents in place (`ScalePlanes.copy_`).

    Raises:
        ValueError: shapes, devices, or a scratch that is not contiguous and 16-byte aligned.
    """

    def __init__(
        self, w13: ScalePlanes, w2: ScalePlanes, scratch13: torch.Tensor, scratch2: torch.Tensor
    ) -> None:
        _check(w13, w2, scratch13, scratch2)
        self.experts = w13.geometry.experts
        values = constants(w13.geometry, w2.geometry)
        self._tiles = values[0] + values[1]
        tensors = []
        for planes, scratch in ((w13, scratch13), (w2, scratch2)):
            tensors += [
                planes.fixed.view(torch.uint32),
                planes.exceptions,
                planes.offsets,
                scratch.view(torch.uint8).view(torch.uint32),
            ]
        self._all = PrebuiltLaunch(expand_all, tensors, values, num_warps=WARPS)
        self._routed = {}
        for dtype in (torch.int32, torch.int64):
            example = torch.zeros(1, dtype=dtype, device=w13.fixed.device)
            for by_expert in (False, True):
                self._routed[dtype, by_expert] = PrebuiltLaunch(
                    expand_routed,
                    tensors,
                    [*values, self.experts, by_expert, IDS_PER_LOAD],
                    varying=(example, 1),
                    num_warps=WARPS,
                )

    def expand(self, stream: torch.cuda.Stream | None = None) -> None:
        """Expand every expert of both planes: one launch, on *stream* or else the current one."""
        self._all(self.experts * self._tiles, stream=stream)

    def expand_routed(self, topk_ids: torch.Tensor) -> None:
        """Expand the experts that *topk_ids* names: one launch.

        Args:
            topk_ids: int32 or int64 on the scratch's device, contiguous, any shape. Doubled ids are expanded once;
                ids outside ``[0, E)`` (vLLM pads with -1) name no expert. Other experts' scratch is left alone.

        Raises:
            ValueError: another dtype, device or a strided tensor.
        """
        count = topk_ids.numel()
        if count == 0:
            return
        by_expert = count > self.experts
        launch = self._routed.get((topk_ids.dtype, by_expert))
        if launch is None or not topk_ids.is_contiguous():
            raise ValueError(
                f"topk_ids must be contiguous int32 or int64; got {topk_ids.dtype} with strides {topk_ids.stride()}"
            )
        ids = topk_ids.data_ptr() if launch.prebuilt else topk_ids
        launch((self.experts if by_expert else count) * self._tiles, ids, count)


class HostExpansion:
    """`LayerExpansion` for CPU tensors, by the reference: for running what is above it without a GPU."""

    def __init__(
        self, w13: ScalePlanes, w2: ScalePlanes, scratch13: torch.Tensor, scratch2: torch.Tensor
    ) -> None:
        _check(w13, w2, scratch13, scratch2)
        self.experts = w13.geometry.experts
        self._pairs = ((w13, scratch13.view(torch.uint8)), (w2, scratch2.view(torch.uint8)))

    def expand(self, stream: None = None) -> None:
        for planes, scratch in self._pairs:
            scratch.copy_(expand(planes))

    def expand_routed(self, topk_ids: torch.Tensor) -> None:
        ids = topk_ids.unique().to(torch.int64)
        ids = ids[(ids >= 0) & (ids < self.experts)]
        for planes, scratch in self._pairs:
            scratch[ids] = expand(planes)[ids]


def make_expansion(
    w13: ScalePlanes, w2: ScalePlanes, scratch13: torch.Tensor, scratch2: torch.Tensor
) -> LayerExpansion | HostExpansion:
    """The expansion for the device of the planes; arguments and errors as for `LayerExpansion`."""
    host = w13.fixed.device.type == "cpu" and not interpreted(expand_all)
    return (HostExpansion if host else LayerExpansion)(w13, w2, scratch13, scratch2)


def _check(
    w13: ScalePlanes, w2: ScalePlanes, scratch13: torch.Tensor, scratch2: torch.Tensor
) -> None:
    if w13.geometry.experts != w2.geometry.experts:
        raise ValueError(f"w13 has {w13.geometry.experts} experts, w2 has {w2.geometry.experts}")
    for name, planes, scratch in (("w13", w13, scratch13), ("w2", w2, scratch2)):
        geometry = planes.geometry
        wanted = (geometry.experts, geometry.rows, geometry.columns)
        if tuple(scratch.shape) != wanted or scratch.element_size() != 1:
            raise ValueError(
                f"{name} scratch must be {wanted} of one byte each; got {tuple(scratch.shape)} {scratch.dtype}"
            )
        if not scratch.is_contiguous() or scratch.data_ptr() % 16 or planes.fixed.data_ptr() % 16:
            raise ValueError(f"{name} scratch and planes must be contiguous and 16-byte aligned")
        if scratch.device != planes.fixed.device:
            raise ValueError(
                f"{name} planes are on {planes.fixed.device}, their scratch on {scratch.device}"
            )
