# SPDX-License-Identifier: Apache-2.0
"""Set-ups in which the shared scratch would be read or written out of order, or planes would move: refused by name.

Every refusal is one sentence that says what to change.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.b12x_a4.provider import get_provider
from vllm.model_executor.layers.quantization.nvfp4_csf.codec import MAX_POSITIONS
from vllm.model_executor.layers.quantization.nvfp4_csf.config import METHOD
from vllm.model_executor.layers.quantization.nvfp4_csf.settings import COMPRESS, NO_SLEEP
from vllm.model_executor.layers.quantization.nvfp4_csf.streams_loader import GROUP, pad_intermediate

LOAD_FORMATS = (METHOD, "dummy")


def refuse_configuration(from_streams: bool) -> None:
    """Look at vLLM's configuration while a CSF layer is made.

    Args:
        from_streams: the checkpoint is CSF (else an ordinary one is compressed at load).

    Raises:
        ValueError: naming what is not supported and what to change.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    problem = _parallel_problem(config.parallel_config) or _offload_problem(config)
    if not problem and from_streams and config.load_config.load_format not in LOAD_FORMATS:
        problem = (
            f"the checkpoint is compressed and load format {config.load_config.load_format!r} cannot read it: add "
            f"--load-format {METHOD}"
        )
    if problem:
        raise ValueError(f"NVFP4-CSF: {problem}{'' if from_streams else f', or unset {COMPRESS}'}.")


def refuse_layer(method: Any, layer: Any) -> None:
    """Look at one layer.

    Raises:
        ValueError: naming layer, found and wanted value.
    """
    problem = _layer_problem(method, layer)
    if not problem:
        refuse_provider()
    if problem:
        raise ValueError(f"NVFP4-CSF: {layer.layer_name}: {problem}.")


def refuse_provider() -> None:
    """Look at the installed b12x: shared scratch needs a weight plan that keeps its source tensors.

    Raises:
        ValueError: naming the package and what it lacks.
    """
    provider = get_provider()
    missing = provider.missing or provider.no_dual
    if missing:
        raise ValueError(
            f"NVFP4-CSF: the installed b12x ({provider.name}) cannot read block scales that change after loading "
            f"({missing}): install flashinfer-python==0.7.2.post1 or b12x==1.5.1."
        )


def refuse_sleep(level: int, *models: torch.nn.Module | None) -> None:
    """Look at a sleep request: level 2 throws away planes, which are no parameters that a reload would restore.

    Raises:
        ValueError: for level 2 of a model with CSF layers.
    """
    from vllm.model_executor.layers.quantization.nvfp4_csf.layer import ATTRIBUTE

    if level < 2:
        return
    layers = (layer for model in models if model is not None for layer in model.modules())
    if any(getattr(layer, ATTRIBUTE, None) is not None for layer in layers):
        raise ValueError(NO_SLEEP)


def _parallel_problem(parallel: Any) -> str:
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism runs several micro-batches over one scale scratch: use tensor parallelism only"
    if parallel.data_parallel_size > 1:
        return "data parallelism is not supported: start one server per replica"
    if parallel.enable_expert_parallel:
        return "expert parallelism is not supported: drop --enable-expert-parallel"
    if parallel.use_ubatching:
        return "micro-batches on two streams would share one scale scratch: drop --enable-dbo and --ubatch-size"
    return ""


def _offload_problem(config: Any) -> str:
    offload = getattr(config, "offload_config", None)
    if offload is None:
        return ""
    if offload.prefetch.offload_group_size > 0:
        return "weight offloading moves tensors that captured CUDA graphs read: drop --offload-group-size"
    if offload.uva.cpu_offload_gb > 0:
        return (
            "weight offloading moves tensors that captured CUDA graphs read: drop --cpu-offload-gb"
        )
    return ""


def _layer_problem(method: Any, layer: Any) -> str:
    moe = layer.moe_config
    if method.nvfp4_backend.name != "B12X":
        return f"MoE backend {method.nvfp4_backend.value} cannot expand compressed scales: add --moe-backend b12x"
    if not (method.use_a16 or envs.VLLM_B12X_MOE_FP4_FORCE_A16):
        return (
            "compressed scales are served W4A16 (with A4 prefill where armed), and this checkpoint would run W4A4: set "
            "VLLM_B12X_MOE_FP4_FORCE_A16=1"
        )
    if moe.moe_parallel_config.use_ep or moe.moe_parallel_config.enable_eplb:
        return "expert parallelism is not supported: use tensor parallelism only"
    if layer.activation != MoEActivation.SILU:
        return f"activation {layer.activation.value} is not supported, only silu is: serve the ordinary checkpoint"
    if moe.in_dtype != torch.bfloat16:
        return f"activations are {moe.in_dtype}: add --dtype bfloat16"
    if moe.has_bias:
        return "expert biases are not supported: serve the ordinary checkpoint"
    if layer.apply_router_weight_on_input:
        return "router weights on the input are not supported: serve the ordinary checkpoint"
    return _geometry_problem(moe.hidden_dim, moe.intermediate_size_per_partition)


def _geometry_problem(hidden: int, share: int) -> str:
    if hidden % 128:
        return f"hidden size {hidden} is no multiple of 128: serve the ordinary checkpoint"
    if share % GROUP:
        return f"{share} intermediate values per rank are no multiple of {GROUP}: use fewer tensor-parallel ranks"
    if 2 * pad_intermediate(share) * (hidden // GROUP) > MAX_POSITIONS:
        return (
            f"{2 * pad_intermediate(share)} x {hidden // GROUP} scales per expert are more than the codec's {MAX_POSITIONS}: use "
            "more tensor-parallel ranks"
        )
    return ""
