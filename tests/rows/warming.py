# SPDX-License-Identifier: Apache-2.0
"""vLLM's own b12x warm-up over given models, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


def model_of(*layers: Any) -> Any:
    """A model of these layers."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(layers)
    return model


def warm_up(target: Any, draft: Any = None, *, max_rows: int, sizes: Sequence[int]) -> None:
    """Warm up as a worker with these models does, for steps of up to *max_rows* rows and graphs of *sizes*."""
    from vllm.model_executor.warmup import b12x_warmup

    worker = SimpleNamespace(
        get_model=lambda: target,
        get_draft_model=lambda: draft,
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(compile_sizes=None)),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_rows, max_num_scheduled_tokens=None
        ),
    )
    b12x_warmup.b12x_warmup(worker, list(sizes))


def warm_up_on_any_device() -> None:
    """vLLM warms b12x up on SM12x only."""
    from vllm.model_executor.warmup import b12x_warmup

    b12x_warmup.current_platform = SimpleNamespace(
        is_cuda=lambda: True, is_device_capability_family=lambda family: True
    )


class Compilations:
    """Counts kernels that b12x compiles or loads from its disk cache, and Triton kernels."""

    def __init__(self) -> None:
        self.triton = 0
        from triton import knobs

        before = knobs.compilation.listener

        def listener(*args: Any, **kwargs: Any) -> None:
            self.triton += 1
            if before is not None:
                before(*args, **kwargs)

        knobs.compilation.listener = listener

    def count(self) -> dict[str, int]:
        from b12x._lib import compiler

        info = compiler.compile_cache_info()
        return {
            "compiled": int(info["compile_misses"]),
            "from_disk": int(info["disk_cache_hits"]),
            "triton": self.triton,
        }
