# SPDX-License-Identifier: Apache-2.0
"""Functions for ``run_child``: the real vLLM engine on CPU over real checkpoints, with the reference b12x.

Logits are compared as SHA-256 of their bytes: compressed scales are lossless, so nothing may differ.
"""

from __future__ import annotations

import hashlib
from typing import Any

PROMPTS = [[1, 2, 3], list(range(1, 41)), [7] * 20]


def serve(model: str, prompts: list[list[int]] | None = None, **options: Any) -> dict[str, Any]:
    """Serve *prompts* on the checkpoint *model* and say what came out and how it was stored."""
    engine, llm = start(model, **options)
    tokens = engine.generate(llm, prompts or PROMPTS, max_tokens=4)
    return {"tokens": tokens, "logits": digest(engine, llm), **describe(engine, llm)}


def start(model: str, **options: Any) -> tuple[Any, Any]:
    """Engine and LLM over *model*."""
    from support import cpu_engine, reference_b12x

    engine = cpu_engine.start()
    real_launch = _real_launch()
    reference_b12x.install()
    engine.replace_launch(real_launch)
    from vllm import LLM

    defaults: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "block_size": 32,
        "seed": 0,
        "kernel_config": {"moe_backend": "b12x"},
        "disable_log_stats": True,
    }
    llm = LLM(**{**defaults, **options})
    engine.logits = record_logits(engine, llm)
    return engine, llm


def _real_launch() -> Any:
    """``_run_b12x_moe_plan`` as vLLM has it; the CPU engine puts a copy in its place."""
    import importlib.util

    spec = importlib.util.find_spec("vllm.model_executor.layers.fused_moe.b12x")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._run_b12x_moe_plan


def record_logits(engine: Any, llm: Any) -> list[bytes]:
    """Every logits tensor that the model computes from now on, as bytes."""
    model = engine.model(llm)
    compute, seen = model.compute_logits, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        seen.append(logits.contiguous().view(-1).float().numpy().tobytes())
        return logits

    model.compute_logits = recorded
    return seen


def digest(engine: Any, llm: Any) -> str:
    assert engine.logits
    return hashlib.sha256(b"".join(engine.logits)).hexdigest()


def describe(engine: Any, llm: Any) -> dict[str, Any]:
    """Names that vLLM compares, methods, and where block scales live."""
    model = engine.model(llm)
    config = llm.llm_engine.vllm_config
    layers = [m for m in model.modules() if hasattr(m, "w13_weight_scale")]
    experts = engine.experts(llm)
    return {
        "quantization": config.model_config.quantization,
        "config_name": config.quant_config.get_name(),
        "config_class": type(config.quant_config).__name__,
        "is_nvfp4": config.model_config.is_nvfp4_quantized(),
        "methods": [type(layer.quant_method).__name__ for layer in layers],
        "scale_addresses": [
            [
                t.data_ptr()
                for t in (e._prepared_experts.w1_blockscale, e._prepared_experts.w2_blockscale)
            ]
            for e in experts
        ],
        "parameter_addresses": [
            [layer.w13_weight_scale.data_ptr(), layer.w2_weight_scale.data_ptr()]
            for layer in layers
        ],
    }
