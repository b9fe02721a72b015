# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels must do, on any device: run in Triton's interpreter on CPU tensors, or compiled on a GPU.

``python -m csf.kernel_checks`` (with TRITON_INTERPRET=1) runs every check and prints one JSON object, name to error
or null; Triton decides at import whether kernels are interpreted, so the tests use a process of its own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import numpy as np
import torch
from csf.streams import golden, plausible_scales
from nvfp4_csf import codec, encoder, expansion, planes

POISON = 0xA5
# (experts, (rows, columns) of w13, of w2): whole slabs, several slabs per tile, and columns that are not a multiple
# of 8, where both halves of a slab have their bases in different order.
SHAPES = [
    (3, (256, 16), (128, 12)),
    (2, (128, 8), (256, 20)),
    (2, (256, 32), (512, 4)),
    (5, (128, 40), (384, 8)),
]
TILE_WORDS = (64, 256, 4096)

CHECKS: dict[str, Callable[[str], None]] = {}


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[function.__name__] = function
    return function


def scales_of(
    experts: int, rows: int, columns: int, seed: int, *, wild: bool = False
) -> np.ndarray:
    """``[E, R, C]`` bytes; *wild* ones have every byte value and far more exceptions than one load takes."""
    if wild:
        rng = np.random.default_rng(seed)
        return rng.integers(0, 256, (experts, rows, columns), dtype=np.uint8)
    return np.stack([plausible_scales(rows, columns, seed + e) for e in range(experts)])


class Case:
    """Both planes of one made-up layer, its poisoned scratch, and what belongs there."""

    def __init__(
        self,
        shape: tuple,
        device: str,
        *,
        wild: bool = False,
        words: int | None = None,
        seed: int = 0,
        scratch: list[torch.Tensor] | None = None,
    ) -> None:
        self.experts, *geometries = shape
        self.planes, self.wanted = [], []
        for index, (rows, columns) in enumerate(geometries):
            scales = scales_of(self.experts, rows, columns, seed + 100 * index, wild=wild)
            built = planes.build([codec.encode(matrix) for matrix in scales])
            self.wanted.append(planes.expand(built).to(device))
            self.planes.append(built.to(device))
        self.scratch = scratch or [torch.empty_like(wanted) for wanted in self.wanted]
        self.poison()
        default = expansion.TILE_WORDS
        try:
            expansion.TILE_WORDS = words or default
            self.layer = expansion.LayerExpansion(*self.planes, *self.scratch)
        finally:
            expansion.TILE_WORDS = default

    def poison(self) -> None:
        for scratch in self.scratch:
            scratch.fill_(POISON)

    def expect(self, experts: set[int]) -> None:
        """Exactly *experts* are expanded, the scratch of all others is as it was."""
        for name, scratch, wanted in zip(("w13", "w2"), self.scratch, self.wanted, strict=True):
            for expert in range(self.experts):
                if expert in experts:
                    assert torch.equal(scratch[expert], wanted[expert]), (
                        f"{name} expert {expert} is wrong"
                    )
                else:
                    assert bool((scratch[expert] == POISON).all()), (
                        f"{name} expert {expert} was touched"
                    )


@check
def expand_writes_the_swizzled_scales(device: str) -> None:
    for shape in SHAPES:
        for words in TILE_WORDS:
            case = Case(shape, device, words=words)
            case.layer.expand()
            case.expect(set(range(case.experts)))


@check
def every_byte_value_and_many_exceptions_survive(device: str) -> None:
    for words in (64, 4096):
        case = Case((2, (128, 16), (256, 12)), device, wild=True, words=words)
        assert int(case.planes[0].offsets[1]) > expansion.EXCEPTIONS_PER_LOAD
        case.layer.expand()
        case.expect({0, 1})


@check
def routed_experts_only(device: str) -> None:
    case = Case(SHAPES[3], device)
    routes = {
        (): set(),
        (3,): {3},
        (1, 1, -1, 4, 1): {1, 4},
        (-1, -1): set(),
        (7, 5, 1 << 20, -5, 0): {0},
        (2, 0, 2, 2, 2, 2, 0, -1, 9, 2, 2): {
            0,
            2,
        },  # more ids than experts: one group of programs per expert
        tuple(range(-1, 6)): {0, 1, 2, 3, 4},
    }
    for ids, experts in routes.items():
        for dtype in (torch.int32, torch.int64):
            case.poison()
            case.layer.expand_routed(torch.tensor(ids, dtype=dtype, device=device))
            case.expect(experts)


@check
def ids_beyond_the_first_load_are_looked_at(device: str) -> None:
    with few_ids_per_load(4):
        many = Case((3, (128, 8), (128, 4)), device)
        ids = torch.full((9, 2), -1, dtype=torch.int32, device=device)
        ids[-1, -1] = 2
        ids[2, 0] = 0
        many.layer.expand_routed(ids)
        many.expect({0, 2})
        # Not more ids than experts: the copy's programs must find the first one, two loads before them.
        doubled = Case((10, (128, 4), (128, 4)), device)
        ids = torch.arange(10, dtype=torch.int32, device=device)
        ids[-1] = 0
        doubled.layer.expand_routed(ids)
        doubled.expect(set(range(9)))


@contextmanager
def few_ids_per_load(count: int) -> Iterator[None]:
    default, expansion.IDS_PER_LOAD = expansion.IDS_PER_LOAD, count
    try:
        yield
    finally:
        expansion.IDS_PER_LOAD = default


@check
def contents_replaced_in_place_are_what_is_expanded_next(device: str) -> None:
    case = Case(SHAPES[0], device)
    case.layer.expand()
    for index, (rows, columns) in enumerate(SHAPES[0][1:]):
        scales = scales_of(case.experts, rows, columns, 900 + index)
        other = planes.build([codec.encode(matrix) for matrix in scales]).to(device)
        case.planes[index].copy_(other)
        case.wanted[index] = planes.expand(other).to(device)
    case.layer.expand()
    case.expect({0, 1, 2})


@check
def encoder_makes_the_codecs_planes(device: str) -> None:
    shapes = [(2, 256, 16), (1, 128, 12), (3, 128, 4), (1, 128, 160)]
    for experts, rows, columns in shapes:
        for wild in (False, True):
            scales = scales_of(experts, rows, columns, 7, wild=wild)
            wanted = planes.build([codec.encode(matrix) for matrix in scales])
            found = encoder.encode(torch.from_numpy(scales).to(device))
            for field in ("fixed", "exceptions", "offsets"):
                same = torch.equal(getattr(found, field).cpu(), getattr(wanted, field))
                assert same, f"{field} of {(experts, rows, columns)}, wild={wild}"


@check
def encoder_makes_the_golden_planes(device: str) -> None:
    for case in golden():
        rows, columns = case.scales.shape
        if rows % 128 or columns % 4:
            continue
        found = encoder.encode(torch.from_numpy(case.scales.copy())[None].to(device))
        [streams] = planes.streams(found)
        assert streams.fixed.tobytes() == case.fixed, case.name
        assert streams.exceptions.tolist() == case.exceptions, case.name


@check
def encoder_refuses_too_small_a_capacity(device: str) -> None:
    scales = torch.from_numpy(scales_of(1, 128, 16, 0, wild=True)).to(device)
    count = int(encoder.encode(scales).offsets[-1])
    encoder.encode(scales, capacity=count)
    try:
        encoder.encode(scales, capacity=count - 1)
    except ValueError as error:
        assert f"{count} scale exceptions" in str(error)
    else:
        raise AssertionError("no error")


@check
def bad_arguments_are_refused(device: str) -> None:
    case = Case(SHAPES[0], device)
    ids = torch.zeros((4, 4), dtype=torch.int32, device=device)
    for bad in (ids.to(torch.int16), ids.t()[:, :2]):
        try:
            case.layer.expand_routed(bad)
        except ValueError as error:
            assert "topk_ids" in str(error)
        else:
            raise AssertionError(f"no error for {bad.dtype} {bad.stride()}")
    for scratch in (case.scratch[0][:, :128], case.scratch[0].to(torch.int16)):
        try:
            expansion.LayerExpansion(*case.planes, scratch, case.scratch[1])
        except ValueError as error:
            assert "scratch must be" in str(error)
        else:
            raise AssertionError("no error")


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    results: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function(device)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
