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
from vllm.model_executor.layers.fused_moe.b12x_a4.agreement import (
    check_ranks_agree,
    check_stages_agree,
    describe,
)
from vllm.model_executor.layers.fused_moe.b12x_a4.arming import Decision, Reason
from vllm.model_executor.layers.fused_moe.b12x_a4.provider import get_provider
from vllm.model_executor.layers.fused_moe.b12x_a4.settings import ARM, EAGER, get_settings
from vllm.v1.worker.moe_row_types import note_armed_layer

logger = init_logger(__name__)

_NVFP4_METHODS = frozenset(
    {"modelopt", "modelopt_fp4", "modelopt_mixed", "deepseek_v4_fp8", "nvfp4_csf"}
)
"""Quantizations whose MoE layers can be vLLM's ModelOptNvFp4FusedMoE."""
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
    finish_model(model, is_draft, getattr(model_config, "quantization", None))


def finish_model(model: torch.nn.Module, is_draft: bool, quantization: str | None = None) -> None:
    """Compare the ranks, then log the summary of *model* on one of them.

    Args:
        quantization: the model's ``--quantization`` as vLLM resolved it. Ranks are compared by it and not by the layers
            that this rank holds, so that all of them take part or none.
    """
    settings = get_settings()
    decisions = arming.decisions_of(model) + _compressed_tensors_layers(model)
    armed = [decision.layer_name for decision in decisions if decision.armed]
    has_layers, is_armed = bool(decisions), bool(armed)
    if quantization in _NVFP4_METHODS:
        # Also with A4 off: the usual difference is that one node has the variable and another has not.
        provider = get_provider() if settings.enabled else None
        ours = describe(
            f"{provider.name}, {provider.kind}" if provider else "", armed, str(settings)
        )
        check_ranks_agree(ours)
        if not is_draft:  # only the last stage has a draft model
            has_layers, is_armed = check_stages_agree(ours, has_layers, is_armed)
            if is_armed:
                note_armed_layer()  # another stage's, perhaps: all of them dispatch alike
    if not settings.enabled or not _is_first_tensor_rank():
        return
    if decisions:
        for level, message in summary(decisions, is_draft, _graphs(*_cuda_graphs())):
            logger.log(level, message)
    elif not has_layers and not is_draft:
        logger.warning(
            "%s is set, but nothing is armed: only MoE layers of ModelOpt NVFP4 checkpoints can be, and this model's use "
            "%s.",
            ARM,
            arming.moe_methods(model),
        )


def summary(decisions: list[Decision], is_draft: bool, graphs: str) -> list[tuple[int, str]]:
    """``(log level, line)``: one line of counts, then one line per reason and one for unequal weight scales.

    *graphs* is the sentence about steps that are replayed from CUDA graphs.
    """
    armed = [decision for decision in decisions if decision.armed]
    model = "draft model: " if is_draft else ""
    if armed:
        provider = get_provider()
        counts = (
            f"A4 prefill: {model}{len(armed)} of {len(decisions)} MoE layers armed. "
            f"b12x is {provider.name}, {_HOW[provider.kind or 'dual']}. {graphs}"
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


def _graphs(capture_limit: int, mode: str, replays_prefill: bool) -> str:
    if not capture_limit:
        return "No CUDA graphs: prefill rows run A4 at every step size."
    if not replays_prefill:
        return f"CUDA graphs ({mode}) replay decode-only steps: prefill rows run A4 at every step size."
    if get_settings().eager:
        return f"Steps with prefill rows bypass CUDA graphs ({EAGER}=1): they run A4 at every step size."
    return (
        f"Steps of up to {capture_limit} rows replay CUDA graphs ({mode}) and run W4A16 for all rows; "
        f"{EAGER}=1 runs those with prefill rows eagerly."
    )


def _cuda_graphs() -> tuple[int, str, bool]:
    """The configured capture limit in rows, the graph mode's name, and whether it has graphs for steps with prefill."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return 0, "", False
    compilation = config.compilation_config
    limit = int(compilation.max_cudagraph_capture_size or 0)
    mode = compilation.cudagraph_mode
    if mode is None:  # vLLM has not resolved it yet
        return limit, "mode not resolved", True
    return limit if mode.name != "NONE" else 0, mode.name, bool(mode.mixed_mode().value)


def _is_first_tensor_rank() -> bool:
    from vllm.distributed.parallel_state import get_tp_group

    try:
        return get_tp_group().rank_in_group == 0
    except AssertionError:  # no group: a test, or a tool
        return True


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
