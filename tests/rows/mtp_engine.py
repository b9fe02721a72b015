# SPDX-License-Identifier: Apache-2.0
"""A served model with its own MTP layer as drafter: vLLM's V2 runner and speculator on CPU, for ``run_child``."""

from __future__ import annotations

from typing import Any

# GLM-4-MoE is the smallest architecture of vLLM with an MTP layer whose experts are NVFP4 like the target's.
MODEL: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        # No linear kernel of NVFP4 runs on a CPU; only the routed experts are quantized.
        "ignore": ["*head*", "head", "*self_attn*", "*mlp.gate", "*shared_experts*", "model.layers.0.mlp*"],
    },
}  # fmt: skip


def serve(prompts: list[int], drafts: int, max_tokens: int) -> dict[str, Any]:
    """Serve prompts of these lengths, *drafts* MTP drafts per step.

    Returns, per forward pass with MoE calls, ``(model, mode, rows)`` of every launch, and what the two models' experts are.
    """
    from support import cpu_engine

    engine = cpu_engine.start()
    passes: list[list[tuple[int, str, int]]] = []
    previous: list[Any] = [None]

    def launch(**call: Any) -> None:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context is not previous[0]:
            previous[0] = context
            passes.append([])
        rows = call["hidden_states"].shape[0]
        passes[-1].append((id(call["prepared"]), call["plan"].caps.quant_mode, rows))
        call["output"].copy_(call["hidden_states"])

    engine.replace_launch(launch)
    llm = engine.llm(
        model=MODEL,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts},
    )
    at_start = len(passes)
    engine.generate(llm, [list(range(1, 1 + length)) for length in prompts], max_tokens=max_tokens)
    runner = engine.runner(llm)
    models = {"target": runner.model, "draft": runner.speculator.model}
    experts = {name: layers_of(model) for name, model in models.items()}
    whose = {
        id(layer.quant_method.moe_kernel.fused_experts._prepared_experts): name
        for name, layers in experts.items()
        for layer in layers
    }
    return {
        "classes": {
            name: [type(layer.quant_method.moe_kernel.fused_experts).__name__ for layer in layers]
            for name, layers in experts.items()
        },
        "compressed": {
            name: [hasattr(layer, "nvfp4_csf") for layer in layers]
            for name, layers in experts.items()
        },
        "passes": [
            [(whose[prepared], mode, rows) for prepared, mode, rows in one]
            for one in passes[at_start:]
        ],
    }


def layers_of(model: Any) -> list[Any]:
    """The routed experts of *model*."""
    return [module for module in model.modules() if hasattr(module, "w13_weight_scale")]
