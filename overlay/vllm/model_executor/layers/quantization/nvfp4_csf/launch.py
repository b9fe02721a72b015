# SPDX-License-Identifier: Apache-2.0
"""Triton launches whose arguments are built once.

``kernel[grid](...)`` binds, specialises and hashes its arguments on every call, tens of microseconds that a prefill
step would pay once per layer. A compiled kernel's ``run`` takes the same values directly; Triton's own
``JITFunction.run`` ends in the very same call (read in 3.6.0 and 3.9.0). Where ``run`` looks different, and in the
interpreter, the ordinary launch is used. Triton's launch hooks (profilers) do not see prebuilt launches; CUDA's do.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.runtime import JITFunction

_RUN_STARTS_WITH = ["gridX", "gridY", "gridZ", "stream", "function"]


def interpreted(kernel: Any) -> bool:
    """Whether *kernel* runs in Triton's interpreter (TRITON_INTERPRET=1 at import), on CPU tensors."""
    return not isinstance(kernel, JITFunction)


class PrebuiltLaunch:
    """One kernel with fixed tensors and constants; optional trailing arguments vary per call.

    Args:
        kernel: the jitted function.
        tensors: leading tensor arguments; kept alive, their addresses are taken now.
        varying: examples of the arguments after those (tensor or int), for compilation; none of them may be
            specialised on its value.
        constants: the constexpr arguments, all of the rest.
        num_warps: warps per program.

    Construction compiles the kernel and loads it on the current device, so that calls may be captured.
    """

    def __init__(
        self,
        kernel: Any,
        tensors: Sequence[torch.Tensor],
        constants: Sequence[int],
        *,
        varying: Sequence[Any] = (),
        num_warps: int,
    ) -> None:
        self._kernel = kernel
        self._tensors = tuple(tensors)
        self._constants = tuple(constants)
        self._num_warps = num_warps
        self._run: Any = None
        if interpreted(kernel):
            return
        compiled = kernel.warmup(*tensors, *varying, *constants, grid=(1,), num_warps=num_warps)
        run = compiled.run  # also loads the kernel
        call = list(inspect.signature(type(run).__call__).parameters)
        if call[1 : 1 + len(_RUN_STARTS_WITH)] == _RUN_STARTS_WITH:
            self._function = compiled.function
            self._metadata = compiled.packed_metadata
            self._addresses = tuple(tensor.data_ptr() for tensor in tensors)
            self._device = tensors[0].device.index
            self._stream_of = triton.runtime.driver.active.get_current_stream
            self._run = run

    @property
    def prebuilt(self) -> bool:
        """Whether calls take the short way."""
        return self._run is not None

    def __call__(
        self, programs: int, *varying: Any, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Launch *programs* programs on *stream*, by default the current one.

        Varying tensors may be given as addresses where the launch is `prebuilt`.
        """
        if self._run is None:
            arguments = (*self._tensors, *varying, *self._constants)
            with torch.cuda.stream(stream):  # None changes nothing
                self._kernel[(programs,)](*arguments, num_warps=self._num_warps)
            return
        handle = self._stream_of(self._device) if stream is None else stream.cuda_stream
        self._run(
            programs, 1, 1, handle, self._function, self._metadata, None, None, None,
            *self._addresses, *varying, *self._constants,
        )  # fmt: skip
