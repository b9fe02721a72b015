# SPDX-License-Identifier: Apache-2.0
"""Pretend that this process runs vLLM on an SM120 device, so that its CUDA code paths run on CPU tensors.

Stands in for three things only, all before vLLM is first imported:

* the compiled extensions that ``vllm.platforms.cuda`` and ``_custom_ops`` ask for at import (empty modules, and
  capability questions that answer no),
* the platform object: CUDA, capability 12.0, 96 GiB, no pinned memory,
* the few ``torch.cuda`` questions that vLLM and b12x ask while they plan and prepare (device properties, current
  device, "is a capture running", ``Tensor.cuda``).

Everything else is vLLM's and b12x's own code. Kernels cannot run. The stand-ins stay until the process ends.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
)
_CAPABILITY_QUESTIONS = (
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "mxfp4_experts_quant_supported",
)
_libraries: list[torch.library.Library] = []  # torch drops the operators of a collected Library
_installed: Any = None


def install(capability: tuple[int, int] = (12, 0)) -> Any:
    """Install the stand-ins once and return the pretended platform.

    Raises:
        RuntimeError: vLLM already chose another platform in this process, or another capability was installed.
    """
    global _installed
    if _installed is not None:
        if tuple(_installed.get_device_capability()) != capability:
            raise RuntimeError(
                f"already installed as {_installed.get_device_capability()}; use a child process"
            )
        return _installed
    import vllm.platforms

    if vllm.platforms._current_platform is not None:
        raise RuntimeError(
            f"vLLM already chose {vllm.platforms._current_platform}; call sm120.install() earlier"
        )
    # vLLM asks a host on the network for flashinfer's binaries otherwise.
    os.environ.setdefault("VLLM_HAS_FLASHINFER_CUBIN", "1")
    for name in _EXTENSIONS:
        sys.modules.setdefault(name, ModuleType(name))
    library = torch.library.Library("_C", "FRAGMENT")
    for name in _CAPABILITY_QUESTIONS:
        library.define(f"{name}(int cuda_device_capability) -> bool")
        library.impl(name, lambda cuda_device_capability: False, "CompositeExplicitAutograd")
    _libraries.append(library)
    torch_cuda(capability)
    _installed = _platform(capability)
    vllm.platforms._current_platform = _installed
    vllm.platforms.current_platform = _installed  # read by modules that import the name
    single_rank()
    return _installed


def torch_cuda(capability: tuple[int, int] = (12, 0)) -> None:
    """Let torch.cuda answer what planning and preparing ask; tensors stay on the CPU."""
    properties = SimpleNamespace(
        name="pretended SM120",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=188,
        shared_memory_per_block_optin=101376,
        total_memory=96 << 30,
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def single_rank() -> None:
    """A tensor-parallel group of one, which weight loading asks for, and a workspace on the CPU."""
    import vllm.distributed.parallel_state as parallel_state
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    parallel_state._PP = SimpleNamespace(rank_in_group=0, world_size=1, rank=0)
    _set_torch_accelerator_to_noop()
    init_workspace_manager(torch.device("cpu"))


def allow_b12x() -> None:
    """Let vLLM select B12xExperts although the library's own device check says no."""
    import vllm.model_executor.layers.fused_moe.b12x as b12x

    b12x.B12xExperts._supports_current_device = staticmethod(lambda: True)


def _platform(capability: tuple[int, int]) -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedSM120(NonNvmlCudaPlatform):
        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"pretended SM{capability[0]}{capability[1]}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 96 << 30

    return PretendedSM120()
