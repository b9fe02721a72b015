# SPDX-License-Identifier: Apache-2.0
"""The real vLLM engine on CPU, for use inside ``run_child``: scheduler, runner, model, ModelOpt, B12xExperts, b12x.

Only three things are not real: the platform's device check, the compiled CPU operators (``cpu_ops``) and the launch
of the b12x kernel, which a test replaces by a function of its own. Example of a function for ``run_child``:

    def decode_only() -> dict:
        engine = cpu_engine.start()
        engine.replace_launch(lambda **launch: launch["output"].copy_(launch["hidden_states"]))
        llm = engine.llm(max_num_batched_tokens=32)
        return {"tokens": engine.generate(llm, [[1, 2, 3]], max_tokens=4)}

vLLM 0.33.0 takes its V1 model runner here. With ``env=cpu_engine.V2`` it takes the V2 runner, whose triton kernels
then run in triton's interpreter (about twice as slow, and the n-gram speculator's kernels do not run there).
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Environment of a child that is to use the V2 model runner. An empty CUDA_VISIBLE_DEVICES makes vLLM keep triton
# although no driver is active.
V2 = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_USE_V2_MODEL_RUNNER": "1"}

# A Qwen3-MoE of two layers that both b12x providers accept; vLLM fills it with dummy weights.
TINY_MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


_engine: Engine | None = None


def start() -> Engine:
    """Install the stand-ins, once. Call it before importing vllm."""
    global _engine
    if _engine is not None:
        return _engine
    os.environ.update(
        VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1"
    )
    from support import cpu_ops, sm120

    sm120.torch_cuda()
    import torch
    import vllm.model_executor.layers.fused_moe.b12x as b12x
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    cpu_ops.install()
    type(current_platform).supported_quantization = []  # empty means: no check
    sm120.allow_b12x()
    init_workspace_manager(torch.device("cpu"))
    _engine = Engine(b12x)
    _engine.replace_launch(lambda **launch: launch["output"].copy_(launch["hidden_states"]))
    return _engine


def start_with_reference() -> Engine:
    """As `start`, with the reference b12x behind vLLM's own launch function: MoE layers compute."""
    if _engine is not None:
        return _engine
    engine = start()
    from support import reference_b12x

    spec = importlib.util.find_spec("vllm.model_executor.layers.fused_moe.b12x")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # a copy: the engine's has its launch replaced
    spec.loader.exec_module(module)
    reference_b12x.install()
    engine.replace_launch(module._run_b12x_moe_plan)
    return engine


class Engine:
    """Handle on the prepared process."""

    def __init__(self, b12x: ModuleType) -> None:
        self.b12x = b12x
        """vLLM's module ``fused_moe.b12x``."""

    def replace_launch(self, launch: Callable[..., Any]) -> None:
        """Call *launch* instead of ``_run_b12x_moe_plan``, with its keyword arguments (plan, scratch, hidden_states,
        prepared, topk_weights, topk_ids, output, unit_scale_contract); it fills ``output`` [M, H]."""
        self.b12x._run_b12x_moe_plan = launch

    def llm(
        self, *, algo: str = "NVFP4", model: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        """A ``vllm.LLM`` on the tiny model with dummy weights; *algo* as in ``make_layer``, *model* overrides
        entries of the model's config.json, *options* those of ``LLM``."""
        from vllm import LLM

        folder = Path(tempfile.mkdtemp(prefix="tiny-model-"))
        config = dict(TINY_MODEL, **(model or {}))
        config.setdefault(
            "quantization_config",
            {
                "quant_method": "modelopt",
                "quant_algo": algo,
                "group_size": 16,
                "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
            },
        )
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        defaults: dict[str, Any] = {
            "model": str(folder),
            "load_format": "dummy",
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
        return LLM(**{**defaults, **options})

    def generate(
        self, llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 4
    ) -> list[list[int]]:
        """Greedy tokens of every prompt (lists of token ids), scheduled together."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [
            list(o.outputs[0].token_ids) for o in llm.generate(inputs, sampling, use_tqdm=False)
        ]

    def experts(self, llm: Any) -> list[Any]:
        """The B12xExperts of every MoE layer, in layer order."""
        kernels = (
            getattr(getattr(m, "quant_method", None), "moe_kernel", None)
            for m in self.model(llm).modules()
        )
        return list(dict.fromkeys(kernel.fused_experts for kernel in kernels if kernel is not None))

    def runner(self, llm: Any) -> Any:
        """The model runner of the only worker."""
        return llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def model(self, llm: Any) -> Any:
        """The loaded model."""
        return self.runner(llm).model


def smoke(
    algo: str = "NVFP4", prompts: Sequence[Sequence[int]] = ((1, 2, 3), tuple(range(1, 41)))
) -> dict[str, Any]:
    """Serve *prompts* and say what the MoE launches saw: (quant mode, rows)."""
    engine = start()
    launches: list[tuple[str, int]] = []

    def launch(**call: Any) -> None:
        launches.append((call["plan"].caps.quant_mode, call["hidden_states"].shape[0]))
        call["output"].copy_(call["hidden_states"])

    engine.replace_launch(launch)
    llm = engine.llm(algo=algo)
    at_start = len(launches)
    tokens = engine.generate(llm, prompts)
    experts = [(type(e).__name__, e._quant_mode) for e in engine.experts(llm)]
    return {"tokens": tokens, "launches": launches[at_start:], "experts": experts}
