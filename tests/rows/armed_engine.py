# SPDX-License-Identifier: Apache-2.0
"""A served model whose layers the load really armed: vLLM's engine on CPU, for ``run_child``."""

from __future__ import annotations

from typing import Any


def serve(prompts: list[int], max_tokens: int, algo: str = "NVFP4") -> dict[str, Any]:
    """Serve prompts of these lengths and return, per engine step and layer, the launches ``(mode, rows)``."""
    from support import cpu_engine

    engine = cpu_engine.start()
    steps: list[dict[int, list[tuple[str, int]]]] = []
    previous: list[Any] = [None]

    def launch(**call: Any) -> None:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context is not previous[0]:
            previous[0] = context
            steps.append({})
        launches = steps[-1].setdefault(id(call["prepared"]), [])
        launches.append((call["plan"].caps.quant_mode, call["hidden_states"].shape[0]))
        call["output"].copy_(call["hidden_states"])

    engine.replace_launch(launch)
    llm = engine.llm(algo=algo, max_num_batched_tokens=32, max_num_seqs=4)
    at_start = len(steps)
    engine.generate(llm, [list(range(1, 1 + length)) for length in prompts], max_tokens=max_tokens)
    return {
        "classes": [type(experts).__name__ for experts in engine.experts(llm)],
        "steps": [list(step.values()) for step in steps[at_start:]],
    }
