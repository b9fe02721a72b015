# SPDX-License-Identifier: Apache-2.0
"""Execution plans, bindings and launches of the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from support.reference_b12x import numerics, regimes
from support.reference_b12x.weights import ReferencePlan, ReferenceWeights


@dataclass(frozen=True)
class DecodeConfig:
    """The decisions of b12x's MoeDecodeConfig that the reference knows."""

    backend: str
    dynamic_tile_m: int | None = None
    dynamic_route_mode: str | None = None
    w4a16_route_mode: str | None = None
    nvfp4_share_input: bool = False
    nvfp4_materialize_intermediate: bool = False


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a plan is made for."""

    max_tokens: int
    num_topk: int
    device: torch.device | str
    weight_plan: ReferencePlan
    quant_mode: str
    decode_config: DecodeConfig | None = None
    core_token_counts: tuple[int, ...] | None = None
    route_num_experts: int | None = None
    apply_router_weight_on_input: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    frozen: bool = True
    regime: regimes.Regime = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))
        weight, mode = self.weight_plan, self.quant_mode
        if mode not in weight.quant_modes:
            raise ValueError(f"quant_mode={mode!r} is absent from the weight plan")
        if mode == "nvfp4" and self.apply_router_weight_on_input:
            raise NotImplementedError("router weights on the input need W4A16")
        if mode == "w4a16":
            regime = regimes.w4a16(
                self.max_tokens,
                self.num_topk,
                weight.num_experts,
                weight.w4a16_weight_layout == "packed",
            )
            config = DecodeConfig("w4a16", w4a16_route_mode=regime.route)
        else:
            regime = regimes.nvfp4(
                self.max_tokens, self.num_topk, weight.num_experts, weight.intermediate_size
            )
            config = DecodeConfig(regime.backend, regime.tile_m, regime.route)
        object.__setattr__(self, "regime", regime)
        if self.decode_config is None:
            object.__setattr__(self, "decode_config", config)


@dataclass(frozen=True)
class ExecutionPlan:
    """A planned launch: family, scheduling decisions, rows per launch."""

    implementation: str
    execution: tuple[Any, ...]
    max_tokens_per_launch: int


@dataclass(frozen=True)
class Launch:
    """One thing that ran."""

    quant_mode: str
    rows: int
    capacity: int
    regime: regimes.Regime
    a4: bool


class ScratchPlan:
    """``fused_moe.plan(Caps(...))``: binds up to ``caps.max_tokens`` rows."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        regime = caps.regime
        execution = (
            regime.route,
            regime.tile_m,
            regime.block_m,
            caps.max_tokens <= regimes.SMALL_TOKENS,
        )
        self.launch_plan = ExecutionPlan(regime.backend, execution, caps.max_tokens)

    def scratch_specs(self) -> tuple[SimpleNamespace, ...]:
        return (SimpleNamespace(shape=(self._nbytes(),), dtype=torch.uint8, name="tp_moe.scratch"),)

    def _nbytes(self) -> int:
        """Sizes of the real ones' order, and as little monotone in the rows as theirs are on small devices."""
        caps, regime = self.caps, self.caps.regime
        weight, routes = caps.weight_plan, caps.max_tokens * caps.num_topk
        n, hidden = weight.intermediate_size, weight.hidden_size
        if regime.backend == "micro":
            return 4096 + routes * (4 * n + hidden)
        if regime.backend == "dynamic":
            tile = regime.tile_m or 16
            tiles = -(-routes // tile) + min(weight.num_experts, routes) - 1
            return 2048 + tiles * tile * (hidden // 2 + hidden // 16)
        if regime.route == "direct":
            return 3072 + routes * 2 * n
        block = regime.block_m or 8
        return (
            1024 + routes * 2 * (2 * n + hidden) + 4 * (routes + weight.num_experts * (block - 1))
        )

    def bind(
        self,
        *,
        scratch: torch.Tensor,
        a: torch.Tensor,
        experts: ReferenceWeights,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        output: torch.Tensor,
        input_scales_static: bool = False,
        unit_scale_contract: bool = False,
        scales_expanded: bool = False,
    ) -> Binding:
        caps = self.caps
        if experts.plan != caps.weight_plan:
            raise ValueError("experts do not match the plan used to size TP MoE scratch")
        rows = int(a.shape[0])
        if rows > caps.max_tokens:
            raise ValueError(
                f"input tokens {rows} exceed TP MoE scratch capacity {caps.max_tokens}"
            )
        if int(a.shape[1]) != caps.weight_plan.hidden_size:
            raise ValueError(f"input hidden size {int(a.shape[1])} does not match TP MoE scratch")
        if int(topk_ids.shape[1]) != caps.num_topk:
            raise ValueError(f"top-k {int(topk_ids.shape[1])} does not match TP MoE scratch")
        if scratch.dtype != torch.uint8:
            raise TypeError(f"scratch must have dtype torch.uint8, got {scratch.dtype}")
        if not scratch.is_contiguous() or scratch.numel() < self._nbytes():
            raise ValueError(f"scratch has {scratch.numel()} bytes, requires {self._nbytes()}")
        return Binding(
            self, scratch, a, experts, topk_weights, topk_ids, output, input_scales_static
        )


@dataclass(frozen=True)
class Binding:
    """Tensors bound to a plan."""

    plan: ScratchPlan
    scratch: torch.Tensor
    a: torch.Tensor
    experts: ReferenceWeights
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    output: torch.Tensor
    input_scales_static: bool
    a4: bool = False

    def with_a4(self, a4: bool) -> Binding:
        return replace(self, a4=a4)

    @property
    def runs_a4(self) -> bool:
        return self.a4 or self.plan.caps.quant_mode == "nvfp4"

    def launch(self) -> Launch:
        caps = self.plan.caps
        return Launch(caps.quant_mode, self.a.shape[0], caps.max_tokens, caps.regime, self.runs_a4)

    def compile_key(self) -> tuple[Any, ...]:
        """What b12x compiles for this launch: geometry, regime, and the row classes its kernels specialise on."""
        caps, rows = self.plan.caps, int(self.a.shape[0])
        regime, config = caps.regime, caps.decode_config
        exact = rows if self._is_small_token_kernel else None
        classes = (rows == 1, rows > regimes.SMALL_TOKENS) if regime.backend == "w4a16" else ()
        return (
            caps.weight_plan, caps.num_topk, caps.quant_mode, self.a4, regime, exact, classes, caps.swiglu_limit,
            config.nvfp4_share_input, config.nvfp4_materialize_intermediate,
        )  # fmt: skip

    def spoil_scratch(self) -> None:
        self.scratch[: self.plan.scratch_specs()[0].shape[0]].fill_(0xFF)

    def run(self) -> torch.Tensor:
        self._check()
        up, gate, down = self.experts.dequantized("nvfp4" if self._native_a4 else "w4a16")
        topk = self.topk_ids.shape[1]
        x = self.a.to(torch.float64)
        total = torch.zeros(self.a.shape, dtype=torch.float64, device=self.a.device)
        for k in range(topk):
            ids = self.topk_ids[:, k].long()
            routed = torch.zeros_like(total)
            for expert in ids.unique().tolist():
                if expert >= 0:  # a padded row's id is -1
                    chosen = (ids == expert).nonzero().flatten()
                    routed[chosen] = self._expert(expert, x[chosen], up, gate, down)
            total += routed * self.topk_weights[:, k : k + 1].double()
        self.output.copy_(total)
        return self.output

    @property
    def _is_small_token_kernel(self) -> bool:
        """NVFP4 micro and W4A16 direct over native weights: compiled per row count, 16-byte addresses."""
        regime, layout = self.plan.caps.regime, self.plan.caps.weight_plan.w4a16_weight_layout
        return regime.backend == "micro" or (
            regime.route == "direct" and regime.backend == "w4a16" and layout == "modelopt"
        )

    @property
    def _native_a4(self) -> bool:
        return self.plan.caps.quant_mode == "nvfp4"

    def _expert(
        self, expert: int, x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        experts, limit = self.experts, self.plan.caps.swiglu_limit
        alpha1, alpha2 = experts.w1_alphas[expert].double(), experts.w2_alphas[expert].double()
        if experts.representation is not None and not self._native_a4:
            alpha1 = experts.representation.w13_global_scale[expert].double()
            alpha2 = experts.representation.w2_global_scale[expert].double()
        if self.runs_a4:
            a1, a2 = (
                scale.expand(experts.num_experts)[expert]
                for scale in (experts.a1_gscale, experts.a2_gscale)
            )
            if not self._native_a4:
                alpha1, alpha2 = alpha1 / a1.double(), alpha2 / a2.double()
            x = numerics.quantize_nvfp4(x, a1)
        hidden = numerics.silu_gated(x @ up[expert].T * alpha1, x @ gate[expert].T * alpha1, limit)
        if self.runs_a4:
            hidden = numerics.quantize_nvfp4(hidden, a2)
        return hidden @ down[expert].T * alpha2

    def _check(self) -> None:
        caps, rows = self.plan.caps, self.topk_ids.shape[0]
        for name in ("a", "topk_weights", "topk_ids", "output"):
            tensor = getattr(self, name)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
            if tensor.shape[0] != rows:
                raise ValueError(f"{name} must have {rows} rows")
        if self.output.shape != self.a.shape or self.output.dtype != self.a.dtype:
            raise ValueError(
                f"output must have shape {tuple(self.a.shape)} and dtype {self.a.dtype}"
            )
        if str(self.a.dtype).removeprefix("torch.") != caps.weight_plan.io_dtype:
            raise TypeError(f"prepared weights were built for {caps.weight_plan.io_dtype}")
        aligned = [self.a, self.output]
        if self._is_small_token_kernel:
            aligned += [self.topk_ids, self.topk_weights]
        if any(tensor.data_ptr() % 16 for tensor in aligned):
            raise AssertionError("pointer must be 16 bytes aligned")
        if caps.decode_config.nvfp4_share_input and not self.experts.can_share_input(
            input_scales_static=True
        ):
            raise ValueError("input scales changed after shared-input preparation")
