# SPDX-License-Identifier: Apache-2.0
"""One owner per loaded model: its CSF layers in order, and the scratch that they share.

All layers of a model expand into one pair of scratch tensors, one layer at a time; whoever uses the scratch must be
ordered against everyone else who does, and only the layers of one model are. A draft model runs between the target's
steps and has graphs of its own, so it must never share: every call of vLLM's ``initialize_model`` makes a new owner
(`owner_scope`, nested calls build parts of one model), and a layer keeps the owner that it was made under.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs, forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.nvfp4_csf.planes import PlaneGeometry
from vllm.model_executor.layers.quantization.nvfp4_csf.prefetch import LayerScales, ScaleScratch
from vllm.model_executor.layers.quantization.nvfp4_csf.settings import COMPRESS, get_settings
from vllm.model_executor.layers.quantization.nvfp4_csf.sizes import readable
from vllm.model_executor.layers.quantization.nvfp4_csf.streams import stream_ops

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.nvfp4_csf.layer import CsfLayer

logger = init_logger(__name__)

Scratch = tuple[torch.Tensor, torch.Tensor]
"""Expanded block scales of w13 and w2, float8_e4m3fn ``[E, R, C]`` in F8_128x4 order."""

_open: list[CsfOwner] = []


@dataclass(eq=False)
class CsfOwner:
    """Layers and scratch of one model.

    Attributes:
        is_draft: whether the model drafts for another one.
        layers: in the order in which the model makes them, which is the order in which it runs them.
    """

    is_draft: bool = False
    layers: list[CsfLayer] = field(default_factory=list)
    _scratch: dict[tuple[PlaneGeometry, PlaneGeometry, torch.device], Scratch] = field(
        default_factory=dict
    )
    _scales: dict[CsfLayer, LayerScales] | None = None

    def scratch(self, w13: PlaneGeometry, w2: PlaneGeometry, device: torch.device) -> Scratch:
        """The scratch pair for layers of this geometry; made at the first call, at the same address ever after."""
        key = w13, w2, device
        pair = self._scratch.get(key)
        if pair is None:
            first, second = (
                torch.zeros((g.experts, g.rows, g.columns), dtype=torch.uint8, device=device).view(
                    torch.float8_e4m3fn
                )
                for g in (w13, w2)
            )
            pair = self._scratch[key] = first, second
        return pair

    def scales_of(self, layer: CsfLayer) -> LayerScales:
        """The hooks of *layer*'s MoE calls.

        The order of writing is settled at the model's first call: weights may arrive, and layers become ready, in
        any order, while a layer's successor has to be the one that runs next.
        """
        if self._scales is None:
            order = ScaleScratch(
                stream_ops(layer.planes[0].fixed.device),
                _current_context,
                prefetch=get_settings().prefetch,
                raise_above_rows=envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
                if get_settings().raise_main_stream
                else None,
            )
            self._scales = {
                other: order.add_layer(other.name, other.expansion)
                for other in self.layers
                if other.is_ready
            }
            if not self.is_draft:  # passes of a draft model have no row types and prefetch nothing
                forward_context.on_context_opens = _entering(weakref.ref(order))
        return self._scales[layer]

    def layer_is_ready(self) -> None:
        """Called by a layer that has its planes; the last one of the model reports the sizes."""
        if all(layer.is_ready for layer in self.layers):
            logger.info("%s", self.report())

    def report(self) -> str:
        """Bytes before and after, in one sentence."""
        plain = sum(layer.plain_bytes for layer in self.layers)
        compressed = sum(layer.nbytes for layer in self.layers)
        scratch = self.scratch_bytes
        saved = plain - compressed - scratch
        balance = (
            f"{readable(saved)} saved"
            if saved >= 0
            else f"the scratch outweighs the saving: {readable(-saved)} more than plain scales take"
        )
        return (
            f"NVFP4-CSF: block scales of {len(self.layers)} MoE layers on this rank: {plain} bytes plain, {compressed} "
            f"bytes compressed ({100 * compressed / plain:.1f} %), {scratch} bytes of shared scratch; "
            f"{balance}"
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch of this model."""
        return sum(t.numel() for pair in self._scratch.values() for t in pair)


@contextmanager
def owner_scope(is_draft: bool = False) -> Iterator[CsfOwner]:
    """Layers made inside belong to one owner: the enclosing scope's, else a new one."""
    if _open:
        yield _open[-1]
        return
    owner = CsfOwner(is_draft)
    _open.append(owner)
    try:
        yield owner
    finally:
        _open.remove(owner)


def with_owner(initialize_model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's ``initialize_model``, which makes one model per outermost call."""

    @functools.wraps(initialize_model)
    def initialize(vllm_config: Any, *, model_config: Any = None, **kwargs: Any) -> Any:
        used = model_config or vllm_config.model_config
        with owner_scope(getattr(used, "runner_type", None) == "draft") as owner:
            model = initialize_model(vllm_config, model_config=model_config, **kwargs)
        if get_settings().compress and not owner.layers and not owner.is_draft:
            from vllm.model_executor.layers.fused_moe.b12x_a4.arming import moe_methods

            logger.warning(
                "%s is set, but nothing is compressed: only MoE layers of ModelOpt NVFP4 checkpoints can be, and this "
                "model's use %s.",
                COMPRESS,
                moe_methods(model),
            )
        return model

    return initialize


def current_owner() -> CsfOwner:
    """The owner for a layer that is being made.

    Raises:
        RuntimeError: outside `owner_scope`: the layer's neighbours would be unknown.
    """
    if not _open:
        raise RuntimeError("CSF layers have to be made inside initialize_model (or owner_scope)")
    return _open[-1]


def _entering(order: weakref.ref[ScaleScratch]) -> Callable[[Any], None]:
    def on_context_opens(context: Any) -> None:
        scratch = order()
        if scratch is not None:  # else the model is gone
            scratch.enter(context)

    return on_context_opens


def _current_context() -> Any:
    return forward_context._forward_context
