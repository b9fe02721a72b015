# SPDX-License-Identifier: Apache-2.0
"""Weight plans and prepared weights of the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from support.reference_b12x import numerics

_MODES = frozenset({"nvfp4", "w4a16"})


@dataclass(frozen=True)
class ReferencePlan:
    """How weights are prepared; equal plans may share execution plans."""

    quant_modes: frozenset[str]
    source_format: str
    activation: str
    io_dtype: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    w13_layout: str

    @property
    def discards_source_parameters(self) -> bool:
        """W4A16 alone is repacked in place; a plan with nvfp4 keeps the source's layout."""
        return self.quant_modes == {"w4a16"}

    @property
    def w4a16_weight_layout(self) -> str | None:
        if "w4a16" not in self.quant_modes:
            return None
        return "packed" if self.discards_source_parameters else "modelopt"


def plan_weights(
    *,
    quant_modes: str | tuple[str, ...],
    source_format: str,
    activation: str,
    params_dtype: torch.dtype,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    w13_layout: str,
) -> ReferencePlan:
    modes = frozenset({quant_modes} if isinstance(quant_modes, str) else quant_modes)
    if not modes or not modes <= _MODES:
        raise ValueError(f"unsupported quant modes {sorted(modes)}")
    if (
        source_format != "modelopt_nvfp4"
        or activation != "silu"
        or w13_layout not in ("w13", "w31")
    ):
        raise ValueError(f"unsupported source {source_format} {activation} {w13_layout}")
    return ReferencePlan(
        modes, source_format, activation, str(params_dtype).removeprefix("torch."), num_experts, hidden_size,
        intermediate_size, w13_layout,
    )  # fmt: skip


@dataclass(frozen=True)
class W4A16Weights:
    """What the W4A16 kernels read: the source tensors themselves, or packed ones."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_global_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_global_scale: torch.Tensor
    workspace: torch.Tensor
    packed: bool


@dataclass(frozen=True)
class ReferenceWeights:
    """Prepared experts; field names as in b12x."""

    plan: ReferencePlan
    a1_gscale: torch.Tensor
    w1_fp4: torch.Tensor
    w1_blockscale: torch.Tensor
    w1_alphas: torch.Tensor
    a2_gscale: torch.Tensor
    w2_fp4: torch.Tensor
    w2_blockscale: torch.Tensor
    w2_alphas: torch.Tensor
    representation: W4A16Weights | None = None
    immutable_input_scales: bool = False
    _uniform: bool = field(default=False, init=False, repr=False)
    _version: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        scales = self.a1_gscale
        if self.immutable_input_scales and "nvfp4" in self.plan.quant_modes and scales.numel() > 1:
            uniform = (torch.isfinite(scales) & (scales > 0) & (scales == scales[0])).all()
            object.__setattr__(self, "_uniform", bool(uniform))
            object.__setattr__(self, "_version", scales._version)

    @classmethod
    def prepare(
        cls,
        *,
        plan: ReferencePlan,
        params_dtype: torch.dtype,
        w1_fp4: torch.Tensor,
        w1_blockscale: torch.Tensor,
        w1_global_scale: torch.Tensor,
        a1_gscale: torch.Tensor,
        w2_fp4: torch.Tensor,
        w2_blockscale: torch.Tensor,
        w2_global_scale: torch.Tensor,
        a2_gscale: torch.Tensor,
        immutable_input_scales: bool = False,
    ) -> ReferenceWeights:
        if str(params_dtype).removeprefix("torch.") != plan.io_dtype:
            raise ValueError(
                f"params_dtype {params_dtype} does not match the plan's {plan.io_dtype}"
            )
        if int(w1_fp4.shape[0]) != plan.num_experts:
            raise ValueError(f"w1 has {int(w1_fp4.shape[0])} experts, the plan {plan.num_experts}")
        w13_global, w2_global = _vector(w1_global_scale), _vector(w2_global_scale)
        alphas = (w13_global, w2_global)
        if "nvfp4" in plan.quant_modes:
            alphas = (w13_global / a1_gscale, w2_global / a2_gscale)
        value = None
        if "w4a16" in plan.quant_modes:
            packed = plan.discards_source_parameters
            scales = (w1_blockscale, w2_blockscale)
            if packed:
                scales = _pack_(plan, w1_fp4, w1_blockscale, w2_fp4, w2_blockscale)
            workspace = torch.zeros(16, dtype=torch.int32, device=w1_fp4.device)
            value = W4A16Weights(
                w1_fp4, scales[0], w13_global, w2_fp4, scales[1], w2_global, workspace, packed
            )
            if packed:
                w1_blockscale, w2_blockscale = scales
        return cls(
            plan, a1_gscale, w1_fp4, w1_blockscale, alphas[0], a2_gscale, w2_fp4, w2_blockscale, alphas[1], value,
            immutable_input_scales,
        )  # fmt: skip

    num_experts = property(lambda self: self.plan.num_experts)
    hidden_size = property(lambda self: self.plan.hidden_size)
    intermediate_size = property(lambda self: self.plan.intermediate_size)

    def can_share_input(self, *, input_scales_static: bool) -> bool:
        """One quantisation of a row may serve all its experts: proven at preparation, void after a mutation."""
        if self.a1_gscale.numel() == 1:
            return True
        if not (self.immutable_input_scales and input_scales_static and self._uniform):
            return False
        return self._version is None or self.a1_gscale._version == self._version

    def dequantized(self, mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(up, gate, down)`` float64 ``[E, n, H]``, ``[E, n, H]``, ``[E, H, n]``, without global scales."""
        plan, value = self.plan, self.representation
        n, hidden = plan.intermediate_size, plan.hidden_size
        if mode == "w4a16" and value is not None and value.packed:
            w13 = numerics.dequantize(value.w13.flip(1), value.w13_scale.double())
            w2 = numerics.dequantize(value.w2.flip(1), value.w2_scale.double())
            up_first = True  # packing rotates the halves where need be
        else:
            if mode == "nvfp4":
                self._exchange_halves_once()
            s13 = numerics.unswizzle(self.w1_blockscale, plan.num_experts, 2 * n, hidden // 16)
            s2 = numerics.unswizzle(self.w2_blockscale, plan.num_experts, hidden, n // 16)
            w13 = numerics.dequantize(self.w1_fp4, s13)
            w2 = numerics.dequantize(self.w2_fp4, s2)
            up_first = mode == "nvfp4" or plan.w13_layout == "w13"
        first, second = w13[:, :n], w13[:, n:]
        return (first, second, w2) if up_first else (second, first, w2)

    def _exchange_halves_once(self) -> None:
        """As b12x: the first NVFP4 use of gate-first weights exchanges the halves in place, for good."""
        key = (self.w1_fp4.data_ptr(), self.w1_blockscale.data_ptr())
        if self.plan.w13_layout == "w13" or key in _exchanged:
            return
        _exchanged.add(key)
        n, blocks = self.plan.intermediate_size, self.plan.hidden_size // 16
        self.w1_fp4.copy_(self.w1_fp4.roll(n, dims=1))
        plain = numerics.unswizzle(self.w1_blockscale, self.plan.num_experts, 2 * n, blocks)
        swapped = numerics.swizzle(plain.roll(n, dims=1))
        self.w1_blockscale.copy_(swapped.view(self.w1_blockscale.shape))


_exchanged: set[tuple[int, int]] = set()


def _vector(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.float32).contiguous()


def _pack_(
    plan: ReferencePlan,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repack the weights in place and return new scales; afterwards the sources are unreadable as such.

    b12x lifts packed scales by ``f = 2**floor(log2(448 / max))`` and flushes what is then below the smallest normal
    E4M3 value, so packed and native W4A16 are not bit-equal.
    """
    n, hidden = plan.intermediate_size, plan.hidden_size
    plain13 = numerics.unswizzle(w13_scale, plan.num_experts, 2 * n, hidden // 16)
    plain2 = numerics.unswizzle(w2_scale, plan.num_experts, hidden, n // 16)
    w13_rows = w13
    if plan.w13_layout == "w31":
        w13_rows, plain13 = w13.roll(n, dims=1), plain13.roll(n, dims=1)
    w13.copy_(w13_rows.flip(1))
    w2.copy_(w2.flip(1))
    return _flush(plain13), _flush(plain2)


def _flush(scales: torch.Tensor) -> torch.Tensor:
    largest = scales.max().clamp(min=2.0**-9)
    factor = torch.exp2(torch.floor(torch.log2(numerics.E4M3_MAX / largest))).clamp(min=1.0)
    return torch.where(scales * factor < 2.0**-6, torch.zeros_like(scales), scales).to(
        torch.float32
    )


__all__: list[Any] = ["ReferencePlan", "ReferenceWeights", "W4A16Weights", "plan_weights"]
