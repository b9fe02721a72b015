# SPDX-License-Identifier: Apache-2.0
"""The shared scratch as a layer's scale parameter: b12x reads it there, nobody else may take it for weights.

What it holds is the last expanded layer's scales; a layer's own are in its planes. So it refuses to be written like a
parameter or saved in a state dict, and where vLLM enumerates weights the planes take its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch


class ScratchParameter(torch.nn.Parameter):
    """A layer's ``w13_weight_scale`` or ``w2_weight_scale``, float8_e4m3fn ``[E, R, C]``, shared by all layers.

    Attributes:
        planes: the `ScalePlanes` of the layer, which are its real scales.
    """

    planes: Any

    def copy_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse weights in kernel format (``reload_weights(is_checkpoint_format=False)``).

        Raises:
            RuntimeError: always; the next expansion would overwrite what is written here.
        """
        raise RuntimeError(
            "NVFP4-CSF: block scales in kernel format cannot be loaded, the layers share one scratch for them: reload in "
            "checkpoint format (is_checkpoint_format=True)."
        )


def refuse_state_dict(layer: torch.nn.Module, *_: Any) -> NoReturn:
    """State dict hook of a CSF layer: a state dict would hold one layer's scales under all names.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"NVFP4-CSF: {getattr(layer, 'layer_name', 'a layer')} cannot be saved, its scales are not in its parameters: copy "
        "the checkpoint that is served, or start without compressed scales to save from."
    )


def with_planes(
    parameters: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """*parameters* of a model with every scratch replaced by the planes that it is filled from."""
    for name, parameter in parameters:
        if not isinstance(parameter, ScratchParameter):
            yield name, parameter
            continue
        planes = parameter.planes
        used = int(planes.offsets[-1])  # words from there on are slack
        yield f"{name}.fixed", planes.fixed
        yield f"{name}.exceptions", planes.exceptions[:used]
        yield f"{name}.offsets", planes.offsets
