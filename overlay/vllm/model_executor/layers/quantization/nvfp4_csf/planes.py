# SPDX-License-Identifier: Apache-2.0
"""The resident layout: what the expansion kernels read, and the one place that defines it.

`ScalePlanes` holds the compressed scales of one projection (w13 or w2) of all experts of a layer. A *slab* is 128
rows of one expert; slab ``t`` of the layer is slab ``t % S`` of expert ``t // S`` with ``S = rows / 128``. Expanding
a slab yields ``128 * C`` bytes in the F8_128x4 order that b12x's kernels (and vLLM's ``swizzle_blockscale``) use:
scale ``(r, c)`` of the slab at byte ``(c // 4) * 512 + (r % 32) * 16 + (r // 32) * 4 + c % 4``.

* ``fixed``, uint8 ``[E, S, 128 * (1 + C / 2)]``: 128 base bytes, position ``p`` for row ``(p % 4) * 32 + p // 4``,
  then ``64 * C`` code bytes. Byte ``o`` of the expanded slab is ``base[(o % 512) // 4] + code[o]``: one base serves a
  32-bit word, neighbouring words need neighbouring bases, no gather. Code byte ``j`` holds the codes of expanded bytes
  ``j`` (low nibble) and ``j + 64 * C`` (high nibble): 16 loaded bytes become two 16-byte stores, each contiguous over
  a warp, by ``(x & 0x0f0f0f0f) + base`` and ``(x >> 4 & 0x0f0f0f0f) + base`` without spreading nibbles. A slab is a
  multiple of 128 bytes long, so every slab starts aligned if the tensor does.
* ``exceptions``, int32 ``[capacity]``, unsigned words ``byte << 24 | place`` with ``place`` the byte's offset in the
  expanded plane of its expert (not the checkpoint's row-major position: the kernel stores without any arithmetic),
  increasing within an expert. Words from ``offsets[-1]`` on are slack.
* ``offsets``, int32 ``[E * S + 1]``: slab ``t`` owns the exceptions ``[offsets[t], offsets[t + 1])``.

`build` makes planes from checkpoint streams, `streams` is its exact inverse, `expand` the reference of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .codec import MAX_POSITIONS, CsfStreamError, CsfStreams, check

SLAB_ROWS = 128
_POSITION = MAX_POSITIONS - 1


@dataclass(frozen=True)
class PlaneGeometry:
    """Logical scale matrices of one projection: ``experts`` of ``[rows, columns]``.

    Raises:
        CsfStreamError: rows not a multiple of 128, columns not of 4, or more than 2^24 scales per expert.
    """

    experts: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if (
            self.experts <= 0
            or self.rows <= 0
            or self.rows % SLAB_ROWS
            or self.columns <= 0
            or self.columns % 4
        ):
            reason = (
                f"{self.experts} experts of {self.rows} x {self.columns} scales; the resident layout needs rows in "
                f"multiples of {SLAB_ROWS} and columns in multiples of 4 (weights padded to 128 rows and K to 64)"
            )
            raise CsfStreamError("", "geometry", 0, reason)
        if self.rows * self.columns > MAX_POSITIONS:
            reason = f"{self.rows} x {self.columns} is more than the {MAX_POSITIONS} positions of the codec"
            raise CsfStreamError("", "geometry", 0, reason)

    @property
    def slabs(self) -> int:
        """Slabs per expert."""
        return self.rows // SLAB_ROWS

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab in ``fixed``."""
        return SLAB_ROWS * (1 + self.columns // 2)

    @property
    def scales_per_slab(self) -> int:
        """Bytes that a slab expands to."""
        return SLAB_ROWS * self.columns

    @property
    def plain_bytes(self) -> int:
        """Bytes of the uncompressed scales of all experts."""
        return self.experts * self.rows * self.columns


@dataclass(frozen=True, eq=False)
class ScalePlanes:
    """Resident planes of one projection; see the module's text for the three tensors."""

    geometry: PlaneGeometry
    fixed: torch.Tensor
    exceptions: torch.Tensor
    offsets: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the planes occupy, slack included."""
        return sum(
            t.numel() * t.element_size() for t in (self.fixed, self.exceptions, self.offsets)
        )

    def to(self, device: torch.device | str) -> ScalePlanes:
        """The same planes on *device*."""
        return ScalePlanes(
            self.geometry,
            self.fixed.to(device),
            self.exceptions.to(device),
            self.offsets.to(device),
        )

    def copy_(self, other: ScalePlanes) -> None:
        """Take over the contents of *other* in place, so that captured graphs keep their addresses.

        Raises:
            ValueError: another geometry, or more exceptions than this object has room for. Nothing was changed.
        """
        if other.geometry != self.geometry:
            raise ValueError(f"planes of {other.geometry} cannot replace planes of {self.geometry}")
        count = int(other.offsets[-1])
        if count > self.exceptions.numel():
            raise ValueError(
                f"the new weights have {count} scale exceptions, the planes have room for {self.exceptions.numel()}"
            )
        self.fixed.copy_(other.fixed)
        self.exceptions[:count].copy_(other.exceptions[:count])
        self.offsets.copy_(other.offsets)


def capacity_for(count: int) -> int:
    """Room kept for *count* exceptions: a sixteenth more and at least 1024, so that a reload usually fits."""
    return count + max(1024, count // 16)


def build(
    matrices: Sequence[CsfStreams],
    device: torch.device | str = "cpu",
    *,
    capacity: int | None = None,
) -> ScalePlanes:
    """Planes from the checkpoint streams of every expert, in expert order (numpy arrays, host).

    Args:
        matrices: E matrices of one shape, already sliced and padded for this rank.
        capacity: words of the exception tensor; default `capacity_for` of what there is.

    Raises:
        CsfStreamError: a malformed stream, or a shape that the layout cannot hold.
    """
    first = matrices[0]
    geometry = PlaneGeometry(len(matrices), first.rows, first.columns)
    for matrix in matrices:
        if (matrix.rows, matrix.columns) != (first.rows, first.columns):
            reason = f"{matrix.rows} x {matrix.columns} beside {first.rows} x {first.columns} of {first.name}"
            raise CsfStreamError(matrix.name, "geometry", 0, reason)
        check(matrix)
    canonical = torch.from_numpy(np.stack([matrix.fixed for matrix in matrices])).to(device)
    counts = np.array([len(matrix.exceptions) for matrix in matrices])
    words = np.concatenate([matrix.exceptions for matrix in matrices]).astype(np.int64)
    expert = np.repeat(np.arange(geometry.experts), counts)
    return _assemble(
        geometry,
        canonical,
        torch.from_numpy(expert).to(device),
        torch.from_numpy(words).to(device),
        capacity,
    )


def _assemble(
    geometry: PlaneGeometry,
    canonical: torch.Tensor,
    expert: torch.Tensor,
    words: torch.Tensor,
    capacity: int | None,
) -> ScalePlanes:
    experts, slabs, columns = geometry.experts, geometry.slabs, geometry.columns
    device = canonical.device
    # The fixed stream's 16-row slabs, eight to one of ours.
    parts = canonical.reshape(experts, slabs, 8, 16 * (1 + columns // 2))
    fixed = torch.empty((experts, slabs, geometry.slab_bytes), dtype=torch.uint8, device=device)
    bases = parts[..., :16].reshape(experts, slabs, 4, 32)
    fixed[..., :SLAB_ROWS].view(experts, slabs, 32, 4).copy_(bases.transpose(2, 3))
    # Four columns are two bytes of nibbles: the whole swizzle is a transpose of 16-bit numbers.
    pairs = parts[..., 16:].reshape(experts, slabs, 4, 32, columns // 2).view(torch.int16)
    swizzled = pairs.permute(0, 1, 4, 3, 2).reshape(experts, slabs, 2, -1).view(torch.uint8)
    first, second = swizzled.unbind(
        2
    )  # halves of the slab; codes of even and odd bytes still share a byte
    codes = fixed[..., SLAB_ROWS:].view(experts, slabs, 32 * columns, 2)
    codes[..., 0] = first & 15 | second << 4
    codes[..., 1] = first >> 4 | second & 240

    position = words & _POSITION
    row, column = position // columns, position % columns
    slab = expert * slabs + row // SLAB_ROWS
    row = row % SLAB_ROWS
    offset = (column // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + column % 4
    place = slab % slabs * geometry.scales_per_slab + offset
    # One key per exception: slab, then place, with the byte carried along in the lowest bits.
    key = ((slab << 24 | place) << 8 | words >> 24).sort().values
    count = key.numel()
    size = capacity_for(count) if capacity is None else capacity
    if size < count:
        raise ValueError(f"{count} scale exceptions do not fit a capacity of {size}")
    exceptions = torch.zeros(size, dtype=torch.int32, device=device)
    exceptions[:count] = _to_int32((key & 255) << 24 | (key >> 8) & _POSITION)
    offsets = torch.zeros(experts * slabs + 1, dtype=torch.int32, device=device)
    offsets[1:] = torch.bincount(key >> 32, minlength=experts * slabs).cumsum(0)
    return ScalePlanes(geometry, fixed, exceptions, offsets)


def streams(planes: ScalePlanes, names: Sequence[str] | None = None) -> list[CsfStreams]:
    """The checkpoint streams of every expert, numpy arrays on the host: the exact inverse of `build`."""
    geometry = planes.geometry
    experts, slabs, columns = geometry.experts, geometry.slabs, geometry.columns
    canonical = torch.empty((experts, slabs, 8, 16 * (1 + columns // 2)), dtype=torch.uint8)
    fixed = planes.fixed.cpu()
    bases = fixed[..., :SLAB_ROWS].reshape(experts, slabs, 32, 4).transpose(2, 3)
    canonical[..., :16] = bases.reshape(experts, slabs, 8, 16)
    even, odd = fixed[..., SLAB_ROWS:].reshape(experts, slabs, 32 * columns, 2).unbind(-1)
    swizzled = torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), -1)
    native = swizzled.view(torch.int16).reshape(experts, slabs, columns // 4, 32, 4)
    pairs = native.permute(0, 1, 4, 3, 2).contiguous().view(torch.uint8)
    canonical[..., 16:] = pairs.reshape(experts, slabs, 8, 8 * columns)

    slab, words = _exception_words(planes)
    offset = (words & _POSITION) % geometry.scales_per_slab
    block, rest = offset // 512, offset % 512
    row = (slab % slabs) * SLAB_ROWS + rest % 16 // 4 * 32 + rest // 16
    position = row * columns + block * 4 + rest % 4
    expert = slab // slabs
    key = ((expert << 24 | position) << 8 | words >> 24).sort().values
    logical = ((key & 255) << 24 | (key >> 8) & _POSITION).numpy().astype("<u4")
    bounds = np.searchsorted((key >> 32).numpy(), np.arange(experts + 1))
    flat = canonical.reshape(experts, -1).numpy()
    return [
        CsfStreams(
            geometry.rows,
            columns,
            flat[index],
            logical[bounds[index] : bounds[index + 1]],
            names[index] if names else "",
        )
        for index in range(experts)
    ]


def expand(planes: ScalePlanes) -> torch.Tensor:
    """What the kernels must write: uint8 ``[E, rows, columns]`` whose bytes are in F8_128x4 order per expert."""
    geometry = planes.geometry
    experts, slabs, size = geometry.experts, geometry.slabs, geometry.scales_per_slab
    out = torch.empty((experts * slabs, size), dtype=torch.uint8, device=planes.fixed.device)
    fixed = planes.fixed.reshape(experts * slabs, geometry.slab_bytes)
    bases = (
        fixed[:, None, :SLAB_ROWS, None].expand(-1, geometry.columns // 4, -1, 4).reshape(-1, size)
    )
    codes = fixed[:, SLAB_ROWS:]
    out[:, : size // 2] = codes & 15
    out[:, size // 2 :] = codes >> 4
    out += bases
    slab, words = _exception_words(planes)
    values = (words >> 24).to(torch.uint8).to(out.device)
    out = out.view(experts, slabs * size)
    out[(slab // slabs).to(out.device), (words & _POSITION).to(out.device)] = values
    return out.view(experts, geometry.rows, geometry.columns)


def _exception_words(planes: ScalePlanes) -> tuple[torch.Tensor, torch.Tensor]:
    """Slab and unsigned word (int64, host) of every exception."""
    offsets = planes.offsets.cpu().to(torch.int64)
    counts = offsets[1:] - offsets[:-1]
    slab = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    words = planes.exceptions[: int(offsets[-1])].cpu().to(torch.int64) & 0xFFFFFFFF
    return slab, words


def _to_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
