# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for vLLM's compiled modules, so that its Python code runs on a GPU from the wheel's .py files alone.

Two parts. :func:`write_files` puts modules into an unpacked vLLM tree: ``vllm.platforms.cuda`` imports them
unconditionally, also in the subprocess that inspects models, where ``sys.modules`` entries of ours would be missing.
:func:`install` replaces, in the running process, the few operators that a small engine with Triton attention calls, by
torch operations with the same results.

For tests only. ``python -m gpu.vllm_stubs ROOT`` writes the files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

QUESTIONS = (
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "mxfp4_experts_quant_supported",
)
_CAPABILITIES = f'''"""Test stand-in: answers no to every question about compiled kernels."""
import torch

LIBRARY = torch.library.Library("_C", "FRAGMENT")
for name in {QUESTIONS!r}:
    LIBRARY.define(f"{{name}}(int cuda_device_capability) -> bool")
    LIBRARY.impl(name, lambda cuda_device_capability: False, "CompositeExplicitAutograd")
'''
FILES = {
    "vllm/_C_stable_libtorch.py": _CAPABILITIES,
    "vllm/_moe_C_stable_libtorch.py": '"""Test stand-in."""\n',
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": '"""Test stand-in."""\n',
}

_views: list[Any] = []
"""Pinned tensors whose device views are in use."""


def environment(*, v2: bool) -> dict[str, str]:
    """Variables of a process that runs engines on these stand-ins, with the V2 or the V1 model runner."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
        "VLLM_B12X_MOE_FP4_FORCE_A16": "1",
    }


def write_files(root: Path) -> None:
    """Write the modules into the unpacked vLLM tree at *root*."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def install() -> None:
    """Replace operators in this process. Call it after ``import vllm`` and before an engine is made."""
    import torch
    import vllm._custom_ops as ops
    import vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 as router_gemm
    import vllm.model_executor.models.registry as registry

    from gpu import sm90

    sm90.install()
    import vllm.model_executor.layers.fused_moe.b12x as b12x

    b12x.B12xExperts._supports_current_device = staticmethod(lambda: True)
    ops.topk_softmax = _topk_softmax
    torch.ops._C.get_cuda_view_from_cpu_tensor = _device_view
    torch.ops._C.weak_ref_tensor = lambda tensor: tensor
    torch.ops._C.greedy_argmax = lambda logits: logits.argmax(dim=-1)
    router_gemm.is_available = lambda: False  # wants a package that is not there
    registry._run_in_subprocess = lambda function: function()  # saves a second import of everything


def _topk_softmax(
    weights: Any,
    ids: Any,
    token_expert_indices: Any,
    logits: Any,
    renormalize: bool = False,
    e_score_correction_bias: Any = None,
    is_padding: Any = None,
) -> None:
    best = logits.float().softmax(-1).topk(ids.shape[-1], dim=-1)
    values = best.values / best.values.sum(-1, keepdim=True) if renormalize else best.values
    weights.copy_(values)
    ids.copy_(best.indices)
    if is_padding is not None:
        ids.masked_fill_(is_padding[:, None], -1)


def _device_view(tensor: Any) -> Any:
    """A CUDA tensor over the pinned host tensor's own memory, as unified addressing allows."""
    import torch

    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cuda")
    assert tensor.is_pinned(), "only pinned memory has a device address"
    strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
    interface = {
        "shape": tuple(tensor.shape), "strides": strides, "typestr": tensor.numpy().dtype.str,
        "data": (tensor.data_ptr(), False), "version": 3,
    }  # fmt: skip
    holder = type("PinnedView", (), {"__cuda_array_interface__": interface})()
    view = torch.as_tensor(holder, device="cuda")
    assert view.data_ptr() == tensor.data_ptr()
    _views.append(tensor)
    return view


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
