# SPDX-License-Identifier: Apache-2.0
"""B12xExperts for layers with a dual plan: prefill rows NVFP4, all other rows W4A16.

A subclass, chosen per layer at load (:func:`dual_plan.experts_class`), so that every other layer keeps running upstream's class
and code without a single test in between.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import b12x
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.b12x_a4 import counters, warmup
from vllm.model_executor.layers.fused_moe.b12x_a4.dual_plan import ATTRIBUTE, DualPlan
from vllm.model_executor.layers.fused_moe.b12x_a4.parts import Part, SplitCache, StepSplit
from vllm.model_executor.layers.fused_moe.b12x_a4.plans import (
    NVFP4,
    SMALL_ROWS,
    W4A16,
    PlanSet,
    make_execution_plan,
    rows_per_launch,
    shared_plan_set,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.prepare import (
    prepare_packed_copy,
    prepare_shared_weights,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.storage import reuse_storage
from vllm.utils.b12x import B12xWarmupUnit

_ALIGNMENT = (
    16  # bytes; b12x asserts it for ids and weights of its small-token kernels (_lib/utils.py)
)
_splits = SplitCache()


class DualPlanExperts(b12x.B12xExperts):
    """NVFP4 experts prepared for both modes over one copy of the weights."""

    def __init__(self, moe_config: mk.FusedMoEConfig, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        if (self._quant_mode, self._source_format, self._w13_layout) != (
            W4A16,
            "modelopt_nvfp4",
            "w13",
        ):
            raise ValueError(
                "a dual plan needs up-first NVFP4 weights that vLLM prepared for W4A16, got "
                f"{self._quant_mode} {self._source_format} {self._w13_layout}"
            )
        self._dual = DualPlan("unknown", None)
        self._packed_experts: Any | None = None
        self._plan_sets: dict[int, tuple[PlanSet, PlanSet]] = {}
        self._max_rows: int | None = None

    # Loading ---------------------------------------------------------------------------------------------------------

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._dual = getattr(layer, ATTRIBUTE)
        self._max_rows = _largest_step()
        super().process_weights_after_loading(layer)
        self._plan_sets.clear()

    def _prepare_experts(self, **weights: Any) -> Any:
        if self._dual.keep_packed:
            self._packed_experts = prepare_packed_copy(self, self._dual, **weights)
        return prepare_shared_weights(self, self._dual, **weights)

    def _reuse_prepared_storage(self, layer: torch.nn.Module, prepared: Any) -> Any:
        name = self._dual.layer_name
        prepared = reuse_storage(getattr(layer, "_b12x_prepared_experts", None), prepared, name)
        self._prepared_experts = layer._b12x_prepared_experts = prepared
        if self._dual.kind == "dual":
            # After a reload these are the new scales; their values are in the first load's by now.
            self.quant_config._w1.scale = prepared.w1_blockscale
            self.quant_config._w2.scale = prepared.w2_blockscale
        if self._packed_experts is not None:
            self._packed_experts = layer._b12x_packed_experts = reuse_storage(
                getattr(layer, "_b12x_packed_experts", None), self._packed_experts, name
            )
        return prepared

    # Planning --------------------------------------------------------------------------------------------------------

    def _sets(self, topk: int) -> tuple[PlanSet, PlanSet]:
        """``(of A4 parts, of W4A16 parts)``; the same set unless packed weights are kept."""
        sets = self._plan_sets.get(topk)
        if sets is None:
            prepared = self._prepared()
            armed = self._dual.scales is not None and self._dual.kind == "dual"
            shared = self._plan_set(prepared, topk, (W4A16, NVFP4) if armed else (W4A16,))
            w4a16 = shared
            if self._packed_experts is not None:
                w4a16 = self._plan_set(self._packed_experts, topk, (W4A16,))
            sets = self._plan_sets[topk] = shared, w4a16
        return sets

    def _plan_set(self, prepared: Any, topk: int, modes: tuple[str, ...]) -> PlanSet:
        # Plans outlive the model, so what makes them must not hold the weights.
        weight_plan, device = prepared.plan, prepared.w1_fp4.device
        swiglu = self._swiglu_params(self.moe_config.activation)
        share_input = NVFP4 in modes and prepared.can_share_input(input_scales_static=True)
        fused_moe = b12x._require_b12x_fused_moe()

        def make_plan(mode: str, capacity: int) -> Any:
            return make_execution_plan(
                fused_moe,
                weight_plan=weight_plan,
                quant_mode=mode,
                capacity=capacity,
                topk=topk,
                device=device,
                swiglu=swiglu,
                share_input=share_input,
            )

        def make_set() -> PlanSet:
            return PlanSet(
                make_plan,
                modes,
                b12x._b12x_scratch_nbytes,
                self._max_rows,
                b12x._is_current_stream_capturing,
            )

        key = (weight_plan, device, topk, swiglu, modes, share_input, self._max_rows)
        return shared_plan_set(key, make_set)

    def _scratch_nbytes(self, rows: int, topk: int) -> int:
        shared, w4a16 = self._sets(topk)
        nbytes = shared.scratch_nbytes(rows)
        return nbytes if w4a16 is shared else max(nbytes, w4a16.scratch_nbytes(rows))

    def moe_problem_size(
        self,
        a1: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:
        """``(E, M, N, K, top_k)`` from the prepared weights, as upstream does for weights that it has released."""
        tokens, hidden_size = a1.shape
        plan = self._prepared_experts.plan
        n = plan.intermediate_size * 2  # gate and up
        return plan.num_experts, tokens, n, hidden_size, topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """As upstream; the scratch serves every split of M rows, so it does not depend on what a profile run ran."""
        itemsize = self.moe_config.in_dtype.itemsize
        elements = -(-self._scratch_nbytes(M, topk) // itemsize)
        return (0,), (max(1, elements),), (M, K)

    # Running ---------------------------------------------------------------------------------------------------------

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool | None,
    ) -> None:
        """Upstream's contract; *hidden_states* and *output* are ``[rows, H]``, ids and weights ``[rows, top_k]``."""
        if expert_map is not None:
            raise ValueError("b12x TP MoE does not support expert maps")
        if apply_router_weight_on_input:
            raise ValueError("a dual plan does not support apply_router_weight_on_input")
        topk_ids = b12x._normalize_topk_ids(topk_ids)
        topk_weights = b12x._normalize_topk_weights(topk_weights)
        rows, topk = topk_ids.shape
        scratch = _as_scratch(workspace2, self._scratch_nbytes(rows, topk))
        split = self._step_split(rows)
        hooks = self._dual.hooks
        if hooks is None:
            self._run(split, scratch, hidden_states, topk_weights, topk_ids, output)
            return
        hooks.before(topk_ids, split)
        try:
            self._run(split, scratch, hidden_states, topk_weights, topk_ids, output)
        finally:
            hooks.after(split)

    def _step_split(self, rows: int) -> StepSplit | None:
        """This step's launches, or None for one W4A16 launch.

        None without row types (decode-only, dummy, profile and drafter forwards), when they describe other rows than
        this call's, and while a graph is captured: a replay cannot know which rows of a later step are prefill.
        """
        if self._dual.scales is None or not is_forward_context_available():
            return None
        row_types = get_forward_context().moe_row_types
        if row_types is None or not row_types.prefill or row_types.num_rows != rows:
            return None
        if b12x._is_current_stream_capturing():
            return None
        split, first = _splits.get(row_types)
        if first:
            counters.count_a4_step(
                self._dual.layer_name, split.num_rows, split.a4_rows, len(split.parts)
            )
        return split

    def _run(
        self,
        split: StepSplit | None,
        scratch: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        if split is None:
            self._launch(False, scratch, hidden_states, topk_weights, topk_ids, output)
            return
        order = None
        rows = (hidden_states, topk_weights, topk_ids, output)
        if split.order is not None:
            order = split.order_on(hidden_states.device)
            gathered = tuple(tensor.index_select(0, order) for tensor in rows[:3])
            rows = (*gathered, torch.empty_like(gathered[0]))
        for part in split.parts:
            self._launch_part(part, scratch, *rows)
        if order is not None:
            output.index_copy_(0, order, rows[3])

    def _launch_part(self, part: Part, scratch: torch.Tensor, *rows: torch.Tensor) -> None:
        limit = part.hi - part.lo
        if part.a4 and self._dual.kind == "dual":
            limit = min(limit, rows_per_launch(self._sets(rows[2].shape[1])[0].plan(NVFP4, limit)))
        for lo in range(part.lo, part.hi, limit):
            self._launch(
                part.a4, scratch, *(tensor[lo : min(lo + limit, part.hi)] for tensor in rows)
            )

    def _launch(
        self,
        a4: bool,
        scratch: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """One b12x launch over all given rows."""
        rows, topk = topk_ids.shape
        if rows <= SMALL_ROWS:
            if topk_ids.data_ptr() % _ALIGNMENT:
                topk_ids = topk_ids.clone()
            if topk_weights.data_ptr() % _ALIGNMENT:
                topk_weights = topk_weights.clone()
        shared, w4a16 = self._sets(topk)
        experts = self._prepared_experts
        call = {
            "scratch": scratch,
            "topk_weights": topk_weights,
            "topk_ids": topk_ids,
            "output": output,
        }
        if self._dual.kind == "bind":
            fused_moe = b12x._require_b12x_fused_moe()
            binding = fused_moe.bind(
                shared.plan(W4A16, rows),
                a=hidden_states,
                experts=experts,
                input_scales_static=True,
                unit_scale_contract=False,
                a4_prefill=a4,
                **call,
            )
            fused_moe.run(binding=binding)
            return
        if a4:
            plan = shared.plan(NVFP4, rows)
        else:
            plan = w4a16.plan(W4A16, rows)
            if w4a16 is not shared:
                experts = self._packed_experts
        b12x._run_b12x_moe_plan(
            plan=plan,
            hidden_states=hidden_states,
            prepared=experts,
            unit_scale_contract=not a4,
            **call,
        )

    # Warm-up ---------------------------------------------------------------------------------------------------------

    def get_b12x_warmup_unit(
        self,
        layer: torch.nn.Module,
        token_counts: tuple[int, ...],
        output_dtype: torch.dtype,
    ) -> B12xWarmupUnit:
        """As upstream, with the plan kind in the key: armed and unarmed layers of one geometry both get warmed up."""
        unit = super().get_b12x_warmup_unit(layer, token_counts, output_dtype)
        dual = self._dual
        kind = (dual.kind, dual.scales is not None, dual.keep_packed)

        def compile() -> None:
            warmup.compile_launches(self, max(token_counts, default=1))

        return B12xWarmupUnit(name=unit.name, key=(*kind, unit.key), compile=compile)


def _as_scratch(workspace: torch.Tensor | None, nbytes: int) -> torch.Tensor:
    if workspace is None:
        raise RuntimeError("b12x MoE requires workspace2 scratch")
    scratch = workspace.view(-1).view(torch.uint8)
    if scratch.numel() < nbytes:
        raise ValueError(
            f"b12x MoE workspace2 is too small: have={scratch.numel()} bytes, need={nbytes} bytes"
        )
    return scratch


def _largest_step() -> int | None:
    """Most rows the scheduler puts into one step, or None without a configuration (tests, tools)."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return None
    scheduler = config.scheduler_config
    return max(scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens or 0)
