# SPDX-License-Identifier: Apache-2.0
"""What the installed b12x can do, found by looking at it rather than at its version.

Two packages provide the top-level name ``b12x`` (flashinfer-python and PyPI's b12x), each overwrites the other, and
builds of either may carry more than their version says. Three abilities matter:

* ``dual``: one weight plan for both modes (``plan_weights(quant_modes=("nvfp4", "w4a16"))``) with heuristic ``Caps``.
* ``bind``: the real bind, ``TPMoEScratchPlan.bind``, takes ``a4_prefill`` and runs A4 over packed W4A16 weights. The
  public ``bind(plan, **kwargs)`` has the same signature in every build and says nothing.
* neither: W4A16 only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import ARM, FORK_SWITCH

logger = init_logger(__name__)

PlanKind = Literal["dual", "bind"]


@dataclass(frozen=True)
class Provider:
    """The b12x of this process.

    Attributes:
        name: what to show, e.g. ``flashinfer-python 0.7.2.post1``.
        kind: how A4 and W4A16 share one copy of the weights, or None.
        missing: what the package lacks; empty when ``kind`` is set.
        no_dual: for kind "bind": why there is no dual plan besides, or empty.
    """

    name: str
    kind: PlanKind | None
    missing: str = ""
    no_dual: str = ""


@functools.cache
def get_provider() -> Provider:
    """Probe the b12x that vLLM uses. Imports b12x's implementation (seconds), so call it at load only."""
    from vllm.utils.b12x import get_b12x_fused_moe

    fused_moe = get_b12x_fused_moe()
    if fused_moe is None:
        return Provider("none", None, "b12x cannot be imported")
    return probe(fused_moe)


def probe(fused_moe: Any) -> Provider:
    """Abilities of *fused_moe*, the module ``b12x.moe.fused_moe`` or a stand-in with the same attributes."""
    name = _describe()
    scratch_plan = getattr(fused_moe, "TPMoEScratchPlan", None)
    if scratch_plan is None:
        scratch_plan = _implementation_attribute(fused_moe, "TPMoEScratchPlan")
    missing = ", ".join(_missing_for_dual(fused_moe))
    if scratch_plan is not None and _takes(scratch_plan.bind, "a4_prefill"):
        return Provider(name, "bind", no_dual=missing)
    if missing:
        return Provider(
            name,
            None,
            "it has neither TPMoEScratchPlan.bind(a4_prefill=) nor one weight plan for "
            f"nvfp4 and w4a16 (missing: {missing})",
        )
    return Provider(name, "dual")


def settle_fork_switches(
    enabled: bool,
    environ: MutableMapping[str, str] | None = None,
    find_provider: Callable[[], Provider] = get_provider,
) -> str | None:
    """Make a b12x that reads the environment itself agree with vLLM's switch, so that it is never half-armed.

    Builds whose bind takes ``a4_prefill`` read ``B12X_W4A16_A4_PREFILL_MIN_TOKENS`` (first generation: plan-time
    opt-in, parsed with ``int()`` in every call) or ``B12X_W4A16_A4_PREFILL`` (second: 0 or 1) when they plan. With A4
    off both are set to 0; with A4 on the second is set to 1 unless the user set it to 0. Other builds read neither,
    and their environment is left alone. Nothing is probed while neither variable is set.

    Returns:
        Why A4 must stay off, or None.
    """
    environ = os.environ if environ is None else environ
    asked = environ.get(FORK_SWITCH, "").strip()
    if not asked and not environ.get(ARM, "").strip():
        return None
    provider = find_provider()
    if not enabled and asked not in ("", "0"):
        logger.warning_once(
            "%s=%s does not arm A4 prefill here: set %s=1.", FORK_SWITCH, asked, ARM
        )
    if provider.kind != "bind":
        return None
    refusal = None
    if enabled and asked == "0":
        enabled = False
        refusal = f"{ARM} arms A4 prefill but {FORK_SWITCH}=0 forbids it: unset one of them"
    environ[FORK_SWITCH] = "1" if enabled else "0"
    if not enabled:
        environ[ARM] = "0"
    return refusal


def _missing_for_dual(fused_moe: Any) -> list[str]:
    missing = [entry for entry in ("Caps", "plan", "bind", "run") if not hasattr(fused_moe, entry)]
    if missing:
        return missing
    caps = fused_moe.Caps
    names = {field.name for field in fields(caps)} if is_dataclass(caps) else set()
    missing = [f"Caps.{name}" for name in ("quant_mode", "decode_config") if name not in names]
    problem = _dual_plan_problem(fused_moe)
    return [*missing, problem] if problem else missing


def _dual_plan_problem(fused_moe: Any) -> str | None:
    """Plan tiny weights for both modes; the planner refuses what it cannot do. No device memory is used."""
    import torch

    try:
        plan = fused_moe.plan_weights(
            quant_modes=("nvfp4", "w4a16"),
            source_format="modelopt_nvfp4",
            activation="silu",
            params_dtype=torch.bfloat16,
            num_experts=2,
            hidden_size=256,
            intermediate_size=128,
            w13_layout="w13",
        )
        discards = plan.discards_source_parameters
    except Exception as error:  # any refusal is an answer
        return f"plan_weights for both modes: {error}"
    if discards:
        return "a weight plan for both modes that keeps the source weights"
    return None


def _takes(function: Any, parameter: str) -> bool:
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _implementation_attribute(fused_moe: Any, name: str) -> Any:
    module_name = getattr(fused_moe, "__name__", None)
    if not isinstance(module_name, str):
        return None
    for candidate in (f"{module_name}.api", f"{module_name}._impl"):
        try:
            module = importlib.import_module(candidate)
        except ImportError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    return None


def _describe() -> str:
    """Name and version of the distribution that ``import b12x`` really gave (both may be installed)."""
    try:
        import b12x
    except ImportError:
        return "b12x (unknown)"
    path = getattr(b12x, "__file__", None) or ""
    distribution = "flashinfer-python" if "flashinfer" in path else "b12x"
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution} ({path or 'no file'})"
