# SPDX-License-Identifier: Apache-2.0
"""Expands the compressed scales of one layer into the scratch that all layers of a model share."""

from __future__ import annotations

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
    """Tiles of about *words* 32-bit words of code bytes (never more unless a single chunk is)."""
    per_slab = 16 * geometry.columns
    chunk = 128 if geometry.columns % 8 == 0 else 64
    chunks = per_slab // chunk
    parts = min(
        p
        for p in range(1, chunks + 1)
        if chunks % p == 0 and (per_slab // p <= words or p == chunks)
    )
    slabs = 1
    while parts == 1 and geometry.slabs % (2 * slabs) == 0 and 2 * slabs * per_slab <= words:
        slabs *= 2
    per_part = chunks // parts
    return Tiling(slabs, parts, per_part & -per_part, geometry.slabs // slabs * parts)


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
        first, second = (tiling(p.geometry, TILE_WORDS) for p in (w13, w2))
        self._tiles = first.tiles + second.tiles
        constants = [first.tiles, second.tiles]
        for planes, tile in ((w13, first), (w2, second)):
            geometry = planes.geometry
            constants += [geometry.rows, geometry.columns, tile.slabs, tile.parts, tile.chunks]
        constants.append(EXCEPTIONS_PER_LOAD)
        tensors = []
        for planes, scratch in ((w13, scratch13), (w2, scratch2)):
            tensors += [
                planes.fixed.view(torch.uint32),
                planes.exceptions,
                planes.offsets,
                scratch.view(torch.uint8).view(torch.uint32),
            ]
        self._all = PrebuiltLaunch(expand_all, tensors, constants, num_warps=WARPS)
        self._routed = {}
        for dtype in (torch.int32, torch.int64):
            example = torch.zeros(1, dtype=dtype, device=w13.fixed.device)
            for by_expert in (False, True):
                self._routed[dtype, by_expert] = PrebuiltLaunch(
                    expand_routed,
                    tensors,
                    [*constants, self.experts, by_expert, IDS_PER_LOAD],
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
