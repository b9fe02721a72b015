# SPDX-License-Identifier: Apache-2.0
"""One NVFP4 MoE layer on the real b12x kernels, and what it must compute, in float64.

Weights are up-first (``w13``), in both modes over one copy (a dual plan) or packed for W4A16. Shapes: ``w13`` uint8
``[E, 2 I, H / 2]``, ``w2`` uint8 ``[E, H, I / 2]``, scales E4M3 ``[E, 2 I, H / 16]`` and ``[E, H, I / 16]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import torch

from gpu import sm90
from gpu.layers import random_scales

MODES = ("w4a16", "nvfp4")
A1, A2 = 300.0, 40.0
"""Activation global scales (b12x's reciprocal form) that suit the random layers below."""


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Logical ``[E, R, C]`` scales in F8_128x4 order, same shape."""
    experts, rows, columns = scales.shape
    tiles = scales.view(experts, rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, columns)


@dataclass(frozen=True)
class Size:
    experts: int
    hidden: int
    intermediate: int
    top_k: int


SMALL = Size(8, 512, 256, 2)
GLM_TP2 = Size(288, 4096, 1024, 8)


@dataclass
class Weights:
    """Random weights of one layer; scales are logical (not swizzled) bytes."""

    size: Size
    w13: torch.Tensor
    w2: torch.Tensor
    scales13: torch.Tensor
    scales2: torch.Tensor
    global13: torch.Tensor
    global2: torch.Tensor


def random_weights(size: Size, seed: int) -> Weights:
    generator = torch.Generator("cuda").manual_seed(seed)

    def codes(rows: int, columns: int) -> torch.Tensor:
        shape = (size.experts, rows, columns // 2)
        found = torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8)
        # -0 times an activation is not what an emulated product gives; the value is the same.
        found = torch.where(found & 0x0F == 0x08, found & 0xF0, found)
        return torch.where(found & 0xF0 == 0x80, found & 0x0F, found)

    def scales(rows: int, columns: int) -> torch.Tensor:
        # Windows around 1 with few strays: near what a trained layer has, and mild enough for a tight comparison.
        found = random_scales(size.experts, rows, columns // 16, generator, strays=0)
        found = found % 16 + 0x30
        spots = torch.randint(
            found.numel(), (found.numel() // 300,), generator=generator, device="cuda"
        )
        found.view(-1)[spots] = 0x18
        return found

    def globals_() -> torch.Tensor:
        return torch.rand(size.experts, generator=generator, device="cuda") * 0.02 + 0.01

    h, i = size.hidden, size.intermediate
    return Weights(
        size, codes(2 * i, h), codes(h, i), scales(2 * i, h), scales(h, i), globals_(), globals_()
    )


@dataclass
class Call:
    """Inputs of one MoE call."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def random_call(size: Size, rows: int, seed: int) -> Call:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, size.hidden, generator=generator, device="cuda").to(torch.bfloat16)
    ids = (
        torch.rand(rows, size.experts, generator=generator, device="cuda").topk(size.top_k).indices
    )
    weights = torch.rand(rows, size.top_k, generator=generator, device="cuda")
    return Call(x, ids.to(torch.int32).contiguous(), weights)


@dataclass
class Prepared:
    """A layer prepared by b12x, and its execution plans by mode and rows."""

    size: Size
    plan: Any
    experts: Any
    plans: dict[tuple[str, int], tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def run(self, mode: str, call: Call, output: torch.Tensor | None = None) -> torch.Tensor:
        """One launch over all rows of *call*; returns bf16 ``[rows, H]``."""
        from b12x.moe import fused_moe

        rows = call.x.shape[0]
        if output is None:
            output = torch.full_like(call.x, float("nan"))
        if (mode, rows) not in self.plans:
            caps = fused_moe.Caps(
                max_tokens=rows, num_topk=self.size.top_k, device=call.x.device, weight_plan=self.plan,
                core_token_counts=(rows,), route_num_experts=0, quant_mode=mode, frozen=True,
            )  # fmt: skip
            plan = fused_moe.plan(caps)
            scratch = torch.empty(
                int(plan.scratch_specs()[0].shape[0]), dtype=torch.uint8, device="cuda"
            )
            self.plans[mode, rows] = plan, scratch
        plan, scratch = self.plans[mode, rows]
        binding = fused_moe.bind(
            plan, scratch=scratch, a=call.x, experts=self.experts, topk_weights=call.weights, topk_ids=call.ids,
            output=output, input_scales_static=True, unit_scale_contract=mode == "w4a16",
        )  # fmt: skip
        fused_moe.run(binding=binding)
        return output


def prepare(
    weights: Weights,
    *,
    modes: Any = ("nvfp4", "w4a16"),
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Prepared:
    """Prepare for *modes*; block scales are the layer's own, or the shared *scratch* (float8 tensors)."""
    sm90.install()
    from b12x.moe import fused_moe

    size = weights.size
    plan = fused_moe.plan_weights(
        quant_modes=modes, source_format="modelopt_nvfp4", activation="silu", params_dtype=torch.bfloat16,
        num_experts=size.experts, hidden_size=size.hidden, intermediate_size=size.intermediate, w13_layout="w13",
    )  # fmt: skip
    if scratch is None:
        scratch = tuple(
            swizzle(s).contiguous().view(torch.float8_e4m3fn)
            for s in (weights.scales13, weights.scales2)
        )
    experts = fused_moe.prepare_weights(
        plan=plan, params_dtype=torch.bfloat16,
        w1_fp4=weights.w13.clone(), w1_blockscale=scratch[0], w1_global_scale=weights.global13.clone(),
        a1_gscale=torch.full((size.experts,), A1, device="cuda"),
        w2_fp4=weights.w2.clone(), w2_blockscale=scratch[1], w2_global_scale=weights.global2.clone(),
        a2_gscale=torch.full((size.experts,), A2, device="cuda"),
    )  # fmt: skip
    return Prepared(size, plan, experts)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
) -> torch.Tensor:
    """Float64 ``[E, R, C]`` of packed codes ``[E, R, C / 2]``."""
    table = torch.cat((_E2M1, -_E2M1)).to(codes.device)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(2).long()]
    factors = scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, 2)
    return values * factors * global_scale.double()[:, None, None]


def quantized(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """NVFP4 activation quantisation of float64 rows: E4M3 block scales, nearest E2M1 (ties away from zero)."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (
        (blocks.abs().amax(-1, keepdim=True) * global_scale / 6).to(torch.float8_e4m3fn).double()
    )
    scaled = torch.where(scale > 0, blocks.double() * global_scale / scale, 0).clamp(-6, 6)
    table = _E2M1.to(x.device)
    nearest = table[(scaled.abs()[..., None] - table).abs().argmin(-1)]
    return (nearest * scaled.sign() * scale / global_scale).flatten(-2)


def reference(weights: Weights, call: Call, *, a4: bool) -> torch.Tensor:
    """Float64 ``[rows, H]``: silu-gated experts over dequantised weights, activations quantised if *a4*."""
    size = weights.size
    w13 = dequantized(weights.w13, weights.scales13, weights.global13)
    w2 = dequantized(weights.w2, weights.scales2, weights.global2)
    x = quantized(call.x, A1) if a4 else call.x.double()
    out = torch.zeros(call.x.shape[0], size.hidden, dtype=torch.float64, device="cuda")
    for expert in call.ids.unique().tolist():
        if expert < 0:
            continue
        row, slot = (call.ids == expert).nonzero(as_tuple=True)
        up, gate = (x[row] @ w13[expert].T).chunk(2, -1)
        middle = torch.nn.functional.silu(gate) * up
        if a4:
            middle = quantized(middle.to(torch.bfloat16), A2)
        out.index_add_(0, row, call.weights[row, slot, None].double() * (middle @ w2[expert].T))
    return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; infinite if anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found.double() - wanted).norm() / wanted.norm())
