# SPDX-License-Identifier: Apache-2.0
"""Functions for ``run_child``: the real vLLM engine on CPU over real checkpoints, with the reference b12x.

Logits are compared as SHA-256 of their bytes: compressed scales are lossless, so nothing may differ.
"""

from __future__ import annotations

import hashlib
from typing import Any

PROMPTS = [[1, 2, 3], list(range(1, 41)), [7] * 20]


def serve_all(ways: dict[str, dict[str, Any]], arm: bool = False) -> dict[str, Any]:
    """Serve the same prompts in several ways, one engine after the other in this process.

    Each way is a dict of LLM options; ``compress`` and ``prefetch`` in it set VLLM_B12X_CSF_COMPRESS and
    VLLM_B12X_CSF_SCALE_PREFETCH, ``reload`` is a folder to reload weights from before a second round of the same prompts.
    """
    import os

    os.environ["VLLM_B12X_MOE_FP4_FORCE_A16"] = "1"
    if arm:
        os.environ["B12X_W4A16_A4_PREFILL_MIN_TOKENS"] = "1"
    results = {}
    for name, options in ways.items():
        options = dict(options)
        os.environ["VLLM_B12X_CSF_COMPRESS"] = "1" if options.pop("compress", False) else "0"
        os.environ["VLLM_B12X_CSF_SCALE_PREFETCH"] = "1" if options.pop("prefetch", True) else "0"
        results[name] = _serve(**options)
    return results


def _serve(model: str, reload: str | None = None, **options: Any) -> dict[str, Any]:
    engine, llm = start(model, **options)
    engine.generate(llm, PROMPTS, max_tokens=4)
    result = {"logits": digest(engine), **describe(engine, llm)}
    if reload is not None:
        engine.logits.clear()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
        llm.reset_prefix_cache()
        engine.generate(llm, PROMPTS, max_tokens=4)
        again = describe(engine, llm)
        same = again["scale_addresses"] == result["scale_addresses"]
        result |= {"reloaded_logits": digest(engine), "same_addresses": same}
    stop(llm)
    return result


def refusals(starts: list[dict[str, Any]]) -> list[str]:
    """The message with which each start fails."""
    import os

    os.environ["VLLM_B12X_MOE_FP4_FORCE_A16"] = "1"
    messages = []
    for options in starts:
        try:
            start(**options)
        except Exception as error:
            messages.append(str(error))
        else:
            raise AssertionError(f"the engine started with {options}")
    return messages


def refused_requests(model: str, folders: list[str]) -> dict[str, Any]:
    """Requests that a running server refuses, and the logits of the same prompts before and after each."""
    import os

    os.environ["VLLM_B12X_MOE_FP4_FORCE_A16"] = "1"
    engine, llm = start(model, quantization="nvfp4_csf", load_format="nvfp4_csf")

    def logits() -> str:
        engine.logits.clear()
        llm.reset_prefix_cache()
        engine.generate(llm, PROMPTS, max_tokens=2)
        return digest(engine)

    def message(request: Any) -> str:
        try:
            request()
        except Exception as error:
            return str(error)
        return ""

    found: dict[str, Any] = {"logits": [logits()], "messages": {}}
    for folder in folders:
        found["messages"][folder] = message(
            lambda folder=folder: llm.collective_rpc(
                "reload_weights", kwargs={"weights_path": folder}
            )
        )
        found["logits"].append(logits())
    found["messages"]["sleep"] = message(lambda: llm.sleep(level=2))
    found["paused"] = llm.llm_engine.engine_core.engine_core.is_scheduler_paused()
    found["logits"].append(logits())
    found["messages"]["state"] = message(lambda: llm.collective_rpc(_state_dict))
    stop(llm)
    return found


def _state_dict(worker: Any) -> int:
    return len(worker.model_runner.model.state_dict())


def stock_refusal(model: str) -> str:
    """The message with which vLLM without the patches fails on *model*."""
    from support import cpu_engine

    cpu_engine.start()
    from vllm import LLM

    try:
        LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=512)
    except Exception as error:
        return str(error)
    raise AssertionError("the engine started")


def stop(llm: Any) -> None:
    """Leave the process ready for the next engine."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def start(model: str, **options: Any) -> tuple[Any, Any]:
    """Engine and LLM over *model*."""
    from support import cpu_engine

    engine = cpu_engine.start_with_reference()
    from vllm import LLM
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    settings.get_settings.cache_clear()
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


def digest(engine: Any) -> str:
    assert engine.logits
    return hashlib.sha256(b"".join(engine.logits)).hexdigest()


def describe(engine: Any, llm: Any) -> dict[str, Any]:
    """Names that vLLM compares, methods, and where block scales live."""
    model = engine.model(llm)
    config = llm.llm_engine.vllm_config
    layers = [m for m in model.modules() if hasattr(m, "w13_weight_scale")]
    experts = engine.experts(llm)
    csf = next((layer.nvfp4_csf for layer in layers if hasattr(layer, "nvfp4_csf")), None)
    order = csf.owner.scales_of(csf).owner if csf is not None else None
    return {
        "prefetched": order.prefetched if order else 0,
        "pending": order.pending if order else False,
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
