# SPDX-License-Identifier: Apache-2.0
"""One summary per loaded model: what is armed, what is not and why, and the check that all ranks agree.

``vllm/model_executor/model_loader/utils.py`` wraps its ``process_weights_after_loading`` with
``model_loader.b12x_a4_report.reported``, which comes here.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.b12x_a4 import arming
from vllm.model_executor.layers.fused_moe.b12x_a4.agreement import check_ranks_agree, describe
from vllm.model_executor.layers.fused_moe.b12x_a4.arming import Decision, Reason
from vllm.model_executor.layers.fused_moe.b12x_a4.provider import get_provider
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import ARM, EAGER, get_settings

logger = init_logger(__name__)

_NORMAL = frozenset({Reason.WEIGHT_ONLY, Reason.DRAFT})
_WARNED_ELSEWHERE = frozenset({Reason.CONFIGURATION})  # by the model runner, for the same reason
_HOW = {
    "dual": "one weight plan for NVFP4 and W4A16",
    "bind": "its own A4 prefill over packed weights",
}


def load_and_report(
    process_weights: Callable[..., None],
    model: torch.nn.Module,
    model_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run the loader's ``process_weights_after_loading(model, model_config, target_device)``, then report."""
    is_draft = getattr(model_config, "runner_type", None) == "draft"
    with arming.loading(is_draft):
        process_weights(model, model_config, *args, **kwargs)
    finish_model(model, is_draft)


def finish_model(model: torch.nn.Module, is_draft: bool) -> None:
    """Compare the ranks, then log the summary of *model*."""
    decisions = arming.decisions_of(model) + _compressed_tensors_layers(model)
    if not decisions:
        if get_settings().enabled and not is_draft:
            logger.warning(
                "%s is set, but the model has no NVFP4 MoE layers: nothing is armed.", ARM
            )
        return
    settings = get_settings()
    armed = [decision.layer_name for decision in decisions if decision.armed]
    # Also with A4 off: the usual difference is that one node has the variable and another has not.
    check_ranks_agree(
        describe(get_provider().name if settings.enabled else "", armed, str(settings))
    )
    if settings.enabled:
        for level, message in summary(decisions, is_draft, _capture_limit()):
            logger.log(level, message)


def summary(decisions: list[Decision], is_draft: bool, capture_limit: int) -> list[tuple[int, str]]:
    """``(log level, line)``: one line of counts, then one line per reason and one for unequal weight scales."""
    armed = [decision for decision in decisions if decision.armed]
    model = "draft model: " if is_draft else ""
    if armed:
        provider = get_provider()
        counts = (
            f"A4 prefill: {model}{len(armed)} of {len(decisions)} MoE layers armed. "
            f"b12x is {provider.name}, {_HOW[provider.kind or 'dual']}. {_graphs(capture_limit)}"
        )
    else:
        counts = f"A4 prefill: {model}none of {len(decisions)} MoE layers armed; every row runs as without {ARM}."
    result = [(logging.INFO, counts)]
    by_reason: dict[Reason, list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision.reason is not None:
            by_reason[decision.reason].append(decision)
    for reason, group in by_reason.items():
        normal = is_draft or reason in _WARNED_ELSEWHERE or (reason in _NORMAL and bool(armed))
        details = ", ".join(dict.fromkeys(d.detail for d in group if d.detail))
        text = f"A4 prefill: {_names(group)} not armed: {reason.value}" + (
            f" ({details})." if details else "."
        )
        result.append((logging.INFO if normal else logging.WARNING, text))
    unequal = [decision for decision in armed if decision.gate_up[0]]
    if unequal:
        experts = sum(decision.gate_up[0] for decision in unequal)
        ratio = max(decision.gate_up[1] for decision in unequal)
        text = (
            f"A4 prefill: gate and up weight global scales differ in {experts} experts of {_names(unequal)}, by up to "
            f"a factor of {ratio:.3g}; as without A4, the gate's is used for both."
        )
        result.append((logging.WARNING, text))
    return result


def _graphs(capture_limit: int) -> str:
    if not capture_limit:
        return "No CUDA graphs: prefill rows run A4 at every step size."
    if get_settings().eager:
        return f"Steps with prefill rows bypass CUDA graphs ({EAGER}=1): they run A4 at every step size."
    return (
        f"Steps of up to {capture_limit} rows replay CUDA graphs and run W4A16 for all rows; "
        f"{EAGER}=1 runs those with prefill rows eagerly."
    )


def _capture_limit() -> int:
    config = get_current_vllm_config_or_none()
    if config is None:
        return 0
    return int(config.compilation_config.max_cudagraph_capture_size or 0)


def _names(decisions: list[Decision], shown: int = 3) -> str:
    names = [decision.layer_name for decision in decisions[:shown]]
    more = len(decisions) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _compressed_tensors_layers(model: torch.nn.Module) -> list[Decision]:
    if not get_settings().enabled:
        return []
    return [
        Decision(getattr(module, "layer_name", name), Reason.COMPRESSED_TENSORS)
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__
        == "CompressedTensorsW4A4Nvfp4MoEMethod"
    ]
