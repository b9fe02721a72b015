# SPDX-License-Identifier: Apache-2.0
"""A b12x for tests: the part of ``b12x.moe.fused_moe`` that vLLM's B12xExperts uses, in plain torch.

Real numerics (E2M1 weights, E4M3 block scales in F8_128x4 order, NVFP4 activation quantisation with the given global
scale, silu-gated), and the library's checks: plan identity, capacity, shapes, scratch size, 16-byte addresses of the
small-token kernels, the proof behind shared input quantisation, the half exchange of "w31" weights, launches that were
not compiled before a capture. A row's result does not depend on the rows beside it, so results can be compared bit for
bit; b12x's real kernels promise less.

    from support import reference_b12x
    b12x = reference_b12x.install()            # vLLM uses it from now on, in this process
    b12x.launches                              # what ran: quant mode, rows, capacity, regime
    b12x.compiled                              # one key per kernel the library would have compiled

``tests/rows/test_reference_contract.py`` compares it with the two real libraries, so that it cannot drift from them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.reference_b12x.execution import Binding, Caps, ExecutionPlan, Launch, ScratchPlan
from support.reference_b12x.weights import ReferencePlan, ReferenceWeights, plan_weights

__all__ = ["Caps", "Launch", "ReferenceB12x", "ReferencePlan", "ReferenceWeights", "install"]


class ReferenceB12x(SimpleNamespace):
    """Stands in for the module ``b12x.moe.fused_moe``.

    Args:
        a4_prefill: build the kind whose bind takes ``a4_prefill`` and runs A4 over packed W4A16 weights.
        dual: whether one weight plan may serve both modes.
        fill_scratch: overwrite a launch's scratch with NaN patterns first, as another layer would.
    """

    def __init__(
        self, *, a4_prefill: bool = False, dual: bool = True, fill_scratch: bool = True
    ) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.compiled: set[tuple[Any, ...]] = set()
        self.capturing = False
        self.fill_scratch = fill_scratch
        self.dual = dual
        self.Caps = Caps
        self.TPMoEScratchPlan = _BindsA4 if a4_prefill else ScratchPlan

    def plan_weights(self, **request: Any) -> ReferencePlan:
        plan = plan_weights(**request)
        if len(plan.quant_modes) > 1 and not self.dual:
            raise ValueError("this build plans one quant mode at a time")
        return plan

    def prepare_weights(self, **request: Any) -> ReferenceWeights:
        return ReferenceWeights.prepare(**request)

    def plan(self, caps: Caps) -> ScratchPlan:
        return self.TPMoEScratchPlan(caps)

    def plan_execution(self, **request: Any) -> ExecutionPlan:
        request["max_tokens"] = request.pop("num_tokens")
        return ScratchPlan(Caps(**request)).launch_plan

    def bind(self, plan: ScratchPlan, **call: Any) -> Binding:
        return plan.bind(**call)

    def run(self, *, binding: Binding) -> Any:
        launch = binding.launch()
        key = binding.compile_key()
        if self.capturing and key not in self.compiled:
            raise RuntimeError(f"launch was not compiled before the capture: {key}")
        self.compiled.add(key)
        self.launches.append(launch)
        if self.fill_scratch:
            binding.spoil_scratch()
        return binding.run()

    def is_supported(self) -> bool:
        return True


class _BindsA4(ScratchPlan):
    """The bind of builds that run A4 over packed weights themselves."""

    def bind(self, *, a4_prefill: bool | None = None, **call: Any) -> Binding:
        binding = super().bind(**call)
        return binding.with_a4(bool(a4_prefill))


def install(**options: Any) -> ReferenceB12x:
    """Make vLLM use a new reference in this process and forget what it learned about another b12x."""
    import vllm.utils.b12x as accessors
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans, provider

    reference = ReferenceB12x(**options)
    accessors._B12X_SUBMODULES["b12x.moe.fused_moe"] = reference
    provider.get_provider.cache_clear()
    plans._shared.clear()
    return reference
