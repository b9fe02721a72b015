# SPDX-License-Identifier: Apache-2.0
"""Expert weights in the form that b12x's dual plan reads: up rows first, each half padded to 64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.nvfp4_csf import codec
from vllm.model_executor.layers.quantization.nvfp4_csf.planes import ScalePlanes, build
from vllm.model_executor.layers.quantization.utils.b12x_moe import _pad_gated_weights
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

logger = init_logger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Weights and *logical* scales (not swizzled); the scales are meta tensors where they come as streams.

    Attributes:
        w13: uint8 ``[E, 2n, H / 2]``, up first; w2: uint8 ``[E, H, n / 2]``.
        w13_scale: float8_e4m3fn ``[E, 2n, H / 16]``; w2_scale: ``[E, H, n / 16]``.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def prepare_weights(
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
) -> Prepared:
    """Reorder and pad as vLLM's ``prepare_nvfp4_moe_layer_for_b12x(reorder_w13=True)`` does before it swizzles.

    Args:
        w13: uint8 ``[E, 2n, H / 2]``, gate rows first, as loaded; w2: uint8 ``[E, H, n / 2]``.
        w13_scale, w2_scale: their scales, or None where streams replace them.
    """
    if w13_scale is None or w2_scale is None:
        w13_scale = _meta_scale(w13)
        w2_scale = _meta_scale(w2)
    swapped = swap_w13_to_w31(w13.data), swap_w13_to_w31(w13_scale.data)
    w13, w13_scale, w2, w2_scale = _pad_gated_weights(*swapped, w2.data, w2_scale.data)
    return Prepared(w13.contiguous(), w13_scale, w2.contiguous(), w2_scale)


def check_global_scales(layer: Any) -> None:
    """Every expert's weight global scales have to be finite and positive; unequal ones of gate and up are logged.

    Raises:
        ValueError: naming layer, tensor, first expert and value.
    """
    for name in ("w13_weight_scale_2", "w2_weight_scale_2"):
        values = getattr(layer, name).data
        bad = ~(torch.isfinite(values) & (values > 0))
        if bool(bad.any()):
            place = bad.nonzero()[0]
            expert, value = int(place[0]), float(values[tuple(place)])
            raise ValueError(
                f"{layer.layer_name}: {name} of expert {expert} is {value}, a finite positive number is wanted; the "
                f"checkpoint is damaged or incomplete ({int(bad.sum())} such values)"
            )
    gate, up = layer.w13_weight_scale_2.data.unbind(1)
    if not torch.allclose(gate, up):
        logger.warning(
            "%s: weight global scales of gate and up differ by up to a factor of %.3g; as without compression, the gate's "
            "is used for both.",
            layer.layer_name,
            float(torch.maximum(gate / up, up / gate).max()),
        )


def constant_planes(prepared: Prepared, device: torch.device) -> tuple[ScalePlanes, ScalePlanes]:
    """Planes of scales 1.0 for ``--load-format dummy``."""
    w13, w2 = (
        _constant(scale.shape[0], scale.shape[1], scale.shape[2], device)
        for scale in (prepared.w13_scale, prepared.w2_scale)
    )
    return w13, w2


def _constant(experts: int, rows: int, columns: int, device: torch.device) -> ScalePlanes:
    scales = torch.full((rows, columns), codec.PAD_BASE, dtype=torch.uint8).numpy()
    streams = codec.encode(scales)
    return build([streams] * experts, device)


def _meta_scale(weight: torch.Tensor) -> torch.Tensor:
    experts, rows, packed = weight.shape
    return torch.empty((experts, rows, packed // 8), dtype=torch.float8_e4m3fn, device="meta")
