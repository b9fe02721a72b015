# SPDX-License-Identifier: Apache-2.0
"""A step's rows as launches: ordered parts of one mode each, or, with many parts, two gathered groups.

Pure host arithmetic on the ranges that the model runner derived from its own arrays; nothing here reads the device.
A split is computed once per step and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.worker.moe_row_types import MoERowTypes

MAX_SLICED_PARTS = 2
"""With more parts than this, rows are gathered into two groups.

From ``tests/gpu/bench ranges`` on an H200 (GLM-5.3-Flash TP2 size, 1,024 rows, emulated FP4): with one prefill range (two
parts) slices and gathering take the same device time (16.71 and 16.76 ms), with two ranges (four parts) slices take twice
as long as gathering (33.1 and 16.8 ms), also on the host (4.3 and 2.5 ms), and so on in proportion. Every A4 part reads
nearly all experts' weights, however few rows it has; gathering costs five small launches and two passes over the
activations whatever the number of parts. Three parts lie between and were not measured: gathering saves one launch there.
"""


@dataclass(frozen=True)
class Part:
    """Rows ``[lo, hi)`` of one mode: *a4* for NVFP4 activations, else W4A16."""

    lo: int
    hi: int
    a4: bool


@dataclass
class StepSplit:
    """How one step's rows are launched.

    Attributes:
        parts: ordered, disjoint, covering ``[0, num_rows)``. With ``order`` set they index the gathered rows (at most
            one W4A16 part followed by one A4 part).
        a4_rows: number of rows that run A4.
        order: int64 host permutation that gathers W4A16 rows first, then A4 rows; None when slices are launched.
    """

    num_rows: int
    parts: tuple[Part, ...]
    a4_rows: int
    order: np.ndarray | None = None
    _device_order: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    def order_on(self, device: torch.device) -> torch.Tensor:
        """``order`` on *device*: copied at the step's first layer, without waiting for the device."""
        assert self.order is not None
        index = self._device_order.get(device)
        if index is None:
            index = torch.from_numpy(self.order)
            if device.type == "cuda":
                index = index.pin_memory().to(device, non_blocking=True)
            self._device_order[device] = index
        return index


def split_rows(num_rows: int, prefill: tuple[tuple[int, int], ...]) -> tuple[Part, ...]:
    """Cut ``[0, num_rows)`` into ordered parts: *prefill* ranges A4, everything between them W4A16.

    Raises:
        ValueError: the ranges are not ordered, disjoint, non-empty and inside the step.
    """
    parts = []
    at = 0
    for lo, hi in prefill:
        if not at <= lo < hi <= num_rows:
            raise ValueError(
                f"prefill ranges {prefill} are not ordered ranges within {num_rows} rows"
            )
        if at < lo:
            parts.append(Part(at, lo, False))
        if parts and parts[-1].a4 and parts[-1].hi == lo:
            parts[-1] = Part(parts[-1].lo, hi, True)
        else:
            parts.append(Part(lo, hi, True))
        at = hi
    if at < num_rows:
        parts.append(Part(at, num_rows, False))
    return tuple(parts)


def make_split(
    num_rows: int, prefill: tuple[tuple[int, int], ...], max_sliced_parts: int | None = None
) -> StepSplit:
    """The launches of a step with *prefill* rows; see :func:`split_rows` for what is refused.

    *max_sliced_parts* is ``MAX_SLICED_PARTS`` unless given.
    """
    if max_sliced_parts is None:
        max_sliced_parts = MAX_SLICED_PARTS
    parts = split_rows(num_rows, prefill)
    a4_rows = sum(part.hi - part.lo for part in parts if part.a4)
    if len(parts) <= max_sliced_parts:
        return StepSplit(num_rows, parts, a4_rows)
    is_a4 = np.zeros(num_rows, dtype=bool)
    for part in parts:
        is_a4[part.lo : part.hi] = part.a4
    order = np.argsort(is_a4, kind="stable").astype(np.int64, copy=False)
    others = num_rows - a4_rows
    gathered = (Part(0, others, False), Part(others, num_rows, True))
    return StepSplit(num_rows, tuple(p for p in gathered if p.lo < p.hi), a4_rows, order)


class SplitCache:
    """The split of the current step, found again by the identity of its row types."""

    def __init__(self) -> None:
        self._row_types: MoERowTypes | None = None
        self._split: StepSplit | None = None

    def get(self, row_types: MoERowTypes) -> tuple[StepSplit, bool]:
        """``(split, first)``: *first* is True the first time in a step, i.e. at its first armed layer."""
        if row_types is self._row_types:
            assert self._split is not None
            return self._split, False
        split = make_split(row_types.num_rows, row_types.prefill)
        self._row_types, self._split = row_types, split
        return split, True
