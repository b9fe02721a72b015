# SPDX-License-Identifier: Apache-2.0
"""Synthetic compressed layers at the sizes of real models, made on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import torch
from nvfp4_csf.encoder import encode
from nvfp4_csf.expansion import LayerExpansion
from nvfp4_csf.planes import ScalePlanes

# Exceptions per scale; GLM-5.3-Flash has 0.29 %.
STRAYS = 0.0029


@dataclass(frozen=True)
class Shape:
    """Experts and scale matrices of one MoE layer on one rank."""

    name: str
    experts: int
    w13: tuple[int, int]
    w2: tuple[int, int]

    @property
    def plain_bytes(self) -> int:
        return self.experts * sum(rows * columns for rows, columns in (self.w13, self.w2))


def glm(tp: int) -> Shape:
    """GLM-5.3-Flash: 288 experts, hidden size 4096, intermediate size 2048 before slicing."""
    local = 2048 // tp
    return Shape(f"GLM-5.3-Flash TP{tp}", 288, (2 * local, 256), (4096, local // 16))


def random_scales(
    experts: int, rows: int, columns: int, generator: torch.Generator, strays: float = STRAYS
) -> torch.Tensor:
    """Uint8 ``[E, R, C]``: per row a window of 16 values, and *strays* of the scales anywhere."""
    device = generator.device
    shape = (experts, rows, columns)
    bases = torch.randint(
        0x30, 0x50, (experts, rows, 1), generator=generator, device=device, dtype=torch.uint8
    )
    scales = torch.randint(0, 16, shape, generator=generator, device=device, dtype=torch.uint8)
    scales += bases
    count = int(strays * scales.numel())
    where = torch.randint(scales.numel(), (count,), generator=generator, device=device)
    values = torch.randint(0, 0x7F, (count,), generator=generator, device=device, dtype=torch.uint8)
    scales.view(-1)[where] = values
    return scales


@dataclass
class Layer:
    """One layer: its logical scales' planes, and its expansion into a scratch."""

    w13: ScalePlanes
    w2: ScalePlanes
    expansion: LayerExpansion

    @property
    def bytes_moved(self) -> int:
        """Least bytes of one expansion of all experts: planes read once, scratch written once."""
        moved = 0
        for planes in (self.w13, self.w2):
            used = int(planes.offsets[-1])
            moved += (
                planes.fixed.nbytes + 4 * used + planes.offsets.nbytes + planes.geometry.plain_bytes
            )
        return moved


def scratch_of(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        torch.empty((shape.experts, *size), dtype=torch.float8_e4m3fn, device="cuda")
        for size in (shape.w13, shape.w2)
    )  # type: ignore[return-value]


def make_layers(
    shape: Shape, count: int, scratch: tuple[torch.Tensor, torch.Tensor], seed: int = 0
) -> list[Layer]:
    """*count* different layers over one scratch."""
    generator = torch.Generator("cuda").manual_seed(seed)
    layers = []
    for _ in range(count):
        w13, w2 = (
            encode(random_scales(shape.experts, *size, generator)) for size in (shape.w13, shape.w2)
        )
        layers.append(Layer(w13, w2, LayerExpansion(w13, w2, *scratch)))
    return layers
