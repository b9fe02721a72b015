# SPDX-License-Identifier: Apache-2.0
"""The same comparison on a GPU: vLLM's device-read check on, with CUDA graphs.

``python -m rows.gpu_cases SPEC.json`` prints JSON; tests/gpu/engine-tests makes the environment. The b12x launch is
replaced, so any CUDA device will do: what is tested is the runners.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPT_LENGTHS = (5, 40, 3, 20, 60, 1, 33, 97)


def serve(runner: str, eager_switch: bool) -> dict[str, Any]:
    """Serve prompts that need chunking on model runner *runner* ("V1" or "V2") and compare every MoE call.

    Every step size has a CUDA graph, so that prefill steps replay one unless *eager_switch* is on. Any device read of
    a step is an error (VLLM_GPU_SYNC_CHECK).
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "V2")),
        VLLM_B12X_A4_PREFILL_EAGER=str(int(eager_switch)),
        B12X_W4A16_A4_PREFILL_MIN_TOKENS="1",
        VLLM_GPU_SYNC_CHECK="error",
    )
    import vllm  # noqa: F401 - the stand-ins replace parts of it
    from gpu import vllm_stubs
    from support.cpu_engine import Engine

    vllm_stubs.install()
    import vllm.model_executor.layers.fused_moe.b12x as b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import counters
    from vllm.v1.worker import moe_row_types

    from rows import engine_cases
    from rows.recorder import Recorder

    moe_row_types.note_armed_layer()
    engine = Engine(b12x)
    engine.replace_launch(lambda **launch: launch["output"].copy_(launch["hidden_states"]))
    llm = engine.llm(
        algo="W4A16_NVFP4",
        enforce_eager=False,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
        block_size=16,
        gpu_memory_utilization=0.2,
        num_gpu_blocks_override=64,
        attention_config={"backend": "TRITON_ATTN"},
        compilation_config={
            "custom_ops": ["none"],
            "mode": 0,
            "cudagraph_mode": "FULL",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
        },
        kernel_config={
            "moe_backend": "b12x",
            "enable_flashinfer_autotune": False,
            "ir_op_priority": {"rms_norm": "native", "fused_add_rms_norm": "native"},
        },
    )
    recorder = Recorder(engine, reads_inputs=False)
    recorder.watch(llm)
    before = counters.snapshot()["graph_rows"]
    tokens = engine.generate(llm, [engine_cases.prompt(n, n) for n in PROMPT_LENGTHS], max_tokens=6)
    result = recorder.result(tokens)
    result["graph_rows"] = counters.snapshot()["graph_rows"] - before
    return result


if __name__ == "__main__":
    print(
        json.dumps(serve(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))), flush=True
    )
    os._exit(0)  # exit handlers wait for things that the stand-ins do not have
