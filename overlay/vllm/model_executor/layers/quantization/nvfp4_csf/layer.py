# SPDX-License-Identifier: Apache-2.0
"""One MoE layer whose block scales are compressed: its planes, its scratch, its place in the model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from vllm.model_executor.layers.quantization.nvfp4_csf.owner import CsfOwner, Scratch
from vllm.model_executor.layers.quantization.nvfp4_csf.planes import ScalePlanes

ATTRIBUTE = "nvfp4_csf"
"""Attribute of vLLM's RoutedExperts that holds the `CsfLayer`."""


class Expansion(Protocol):
    """What `expansion.LayerExpansion` offers."""

    experts: int

    def expand(self, stream: Any = None) -> None: ...
    def expand_routed(self, topk_ids: torch.Tensor) -> None: ...


class CsfLayer:
    """Made when the layer is made, filled when its scales have arrived, refilled in place by a reload."""

    def __init__(self, owner: CsfOwner, name: str) -> None:
        self.owner, self.name = owner, name
        self.index = len(owner.layers)
        owner.layers.append(self)
        self._planes: tuple[ScalePlanes, ScalePlanes] | None = None
        self._scratch: Scratch | None = None
        self._expansion: Expansion | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the planes are there."""
        return self._planes is not None

    @property
    def planes(self) -> tuple[ScalePlanes, ScalePlanes]:
        """Planes of w13 and w2."""
        assert self._planes is not None, f"{self.name} has no scales yet"
        return self._planes

    @property
    def scratch(self) -> Scratch:
        """The shared tensors that this layer's prepared experts read."""
        assert self._scratch is not None, f"{self.name} has no scales yet"
        return self._scratch

    @property
    def expansion(self) -> Expansion:
        """Fills the scratch from the planes."""
        assert self._expansion is not None, f"{self.name} has no scales yet"
        return self._expansion

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return sum(planes.nbytes for planes in self._planes or ())

    @property
    def plain_bytes(self) -> int:
        """Bytes that the scales would take uncompressed."""
        return sum(planes.geometry.plain_bytes for planes in self._planes or ())

    def before(self, topk_ids: torch.Tensor, split: Any) -> None:
        """Before the first launch of an MoE call (``b12x_a4.dual_plan.MoECallHooks``): fill the scratch."""
        self.owner.scales_of(self).before(topk_ids, split)

    def after(self, split: Any) -> None:
        """After the last launch was queued: perhaps start the next layer's expansion."""
        self.owner.scales_of(self).after(split)

    def set_planes(self, w13: ScalePlanes, w2: ScalePlanes) -> None:
        """Take the planes; those of a reload are copied into the first ones, whose addresses graphs hold.

        Raises:
            RuntimeError: the reloaded scales need more room than the first ones left; nothing was changed.
        """
        if self._planes is not None:
            self._replace(w13, w2)
            return
        self._planes = w13, w2
        self._scratch = self.owner.scratch(w13.geometry, w2.geometry, w13.fixed.device)
        from vllm.model_executor.layers.quantization.nvfp4_csf.expansion import make_expansion

        self._expansion = make_expansion(w13, w2, *self._scratch)
        self.owner.layer_is_ready()

    def _replace(self, w13: ScalePlanes, w2: ScalePlanes) -> None:
        pairs = list(zip(self.planes, (w13, w2), strict=True))
        for old, new in pairs:
            count = int(new.offsets[-1])
            if new.geometry != old.geometry or count > old.exceptions.numel():
                raise RuntimeError(
                    f"{self.name}: the reloaded scales need {count} exception words of {new.geometry}, there is room for "
                    f"{old.exceptions.numel()} of {old.geometry}, and captured CUDA graphs hold its address: restart the "
                    "server to serve these weights."
                )
        for old, new in pairs:
            old.copy_(new)


__all__ = ["ATTRIBUTE", "CsfLayer", "Expansion"]
