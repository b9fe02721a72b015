# SPDX-License-Identifier: Apache-2.0
"""Keeps compressed scales away from load formats that would leave them out in silence."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import torch
from vllm.model_executor.layers.quantization.nvfp4_csf.container import EXCEPTIONS, FIXED

_METHOD = "nvfp4_csf"


def refuse_csf_streams(
    weights: Iterable[tuple[str, torch.Tensor]], load_format: str
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Pass *weights* on unless another load format than ``nvfp4_csf`` meets a compressed stream.

    Models skip tensors whose names they do not know, and the scale parameters would stay uninitialised.

    Raises:
        ValueError: at the first stream.
    """
    for name, tensor in weights:
        if load_format != _METHOD and name.endswith((FIXED, EXCEPTIONS)):
            raise ValueError(
                f"{name}: the checkpoint's scales are compressed (NVFP4-CSF) and load format {load_format!r} would leave "
                f"them out: add --load-format {_METHOD}, or restore the ordinary checkpoint with `convert-csf --restore`."
            )
        yield name, tensor
