# SPDX-License-Identifier: Apache-2.0
"""A small vLLM engine on the GPU, in every way to serve one checkpoint: ``python -m gpu.engine SPEC.json`` prints JSON.

The spec: ``folder`` (two checkpoints, ``model`` and ``other``, are made in it), ``runner`` ("v1" or "v2"), ``ways``
(name to options: ``env`` for environment variables read at load, ``model`` which checkpoint, ``reload`` whether to load
the other one's weights afterwards and serve again; the rest for ``vllm.LLM``). Each way serves the same prompts; its
result has the SHA-256 of all logits, how far those of the first step are from the first way's, greedy tokens, and how
often scales were expanded ahead and in line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gpu import vllm_stubs

PROMPTS = [
    list(range(1, 6)),
    list(range(1, 41)),
    [7] * 3,
    list(range(100, 120)),
    list(range(1, 61)),
]
SEEDS = {"model": 0, "other": 7}


def serve(spec: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(vllm_stubs.environment(v2=spec["runner"] == "v2"))
    import vllm  # noqa: F401 - the stand-ins replace parts of it

    vllm_stubs.install()
    from csf import checkpoints

    folders = {name: Path(spec["folder"]) / name for name in SEEDS}
    for name, folder in folders.items():
        if not folder.exists():
            checkpoints.write(folder, mtp_layer=False, seed=SEEDS[name])
    results: dict[str, Any] = {}
    first: list[Any] | None = None
    for name, options in spec["ways"].items():
        start = time.monotonic()
        results[name], logits = _serve_one(folders, dict(options))
        if first is None:
            first = logits
        results[name]["first_step_difference"] = _difference(first[0], logits[0])
        results[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def _serve_one(
    folders: dict[str, Path], options: dict[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings as csf_settings

    os.environ.update(options.pop("env", {}))
    model_name, reload = options.pop("model", "model"), options.pop("reload", False)
    csf_settings.get_settings.cache_clear()
    eager = options.setdefault("enforce_eager", True)
    compilation: dict[str, Any] = {"custom_ops": ["none"], "mode": 0}
    if not eager:
        compilation["cudagraph_capture_sizes"] = [1, 2, 4, 8]
    llm = LLM(  # kv_cache_memory_bytes: no memory profiling, which fails beside other engines on the device
        model=str(folders[model_name]), skip_tokenizer_init=True, max_model_len=256, max_num_batched_tokens=64,
        max_num_seqs=8, gpu_memory_utilization=0.1, kv_cache_memory_bytes=64 << 20, num_gpu_blocks_override=64, disable_log_stats=True, seed=0,
        kernel_config={"moe_backend": "b12x", "enable_flashinfer_autotune": False, "ir_op_priority": {"rms_norm": "native", "fused_add_rms_norm": "native"}},
        attention_config={"backend": "TRITON_ATTN"}, compilation_config=compilation, **options,
    )  # fmt: skip
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    logits: list[torch.Tensor] = []
    compute = model.compute_logits

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        logits.append(found.float().cpu())
        return found

    model.compute_logits = recorded
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

    def generate() -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [
            list(o.outputs[0].token_ids) for o in llm.generate(inputs, sampling, use_tqdm=False)
        ]

    result: dict[str, Any] = {
        "tokens": generate(),
        "logits": _digest(logits),
        "finite": _finite(logits),
    }
    seen = list(logits)
    if reload:
        logits.clear()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders["other"])})
        llm.reset_prefix_cache()
        result |= {"reloaded_tokens": generate(), "reloaded_logits": _digest(logits)}
    result |= _expansions(model)
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    return result, seen


def _expansions(model: Any) -> dict[str, int]:
    """Counts of the model's `ScaleScratch`, if it has compressed scales."""
    for module in model.modules():
        layer = getattr(module, "nvfp4_csf", None)
        if layer is not None:
            order = layer.owner.scales_of(layer).owner
            return {"ahead": order.prefetched, "in_line": order.expanded}
    return {}


def _digest(logits: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in logits:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _finite(logits: list[Any]) -> bool:
    return bool(logits) and all(bool(tensor.isfinite().all()) for tensor in logits)


def _difference(first: Any, other: Any) -> float | None:
    """Largest absolute difference as a share of the largest logit; None where the steps differ in shape."""
    if first.shape != other.shape:
        return None
    return float((first - other).abs().max() / first.abs().max())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps(serve(spec)), flush=True)
    os._exit(0)  # exit handlers wait for things that the stand-ins do not have


if __name__ == "__main__":
    main()
