# SPDX-License-Identifier: Apache-2.0
"""Which expert tensors of a layer have come while an ordinary checkpoint is compressed at load.

vLLM's online processing counts loaded elements and processes a layer when the count is full: a tensor that comes twice
closes the layer before its last one, and a layer that never gets full is processed in the end with whatever memory its
missing parts had. Neither is an error there; here both are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}
_TENSORS = ("weight", "weight_scale", "weight_scale_2")

Key = tuple[str, int, str]
"""Parameter, expert, shard (vLLM's w1 gate, w3 up, w2 down)."""


class Arrivals:
    """The tensors that one layer waits for. Made before online processing wraps the loaders.

    Args:
        layer: vLLM's RoutedExperts, with its weights created.
    """

    def __init__(self, layer: Any) -> None:
        self._name = layer.layer_name
        # Beyond the logical experts there may be shared ones, whose scales vLLM makes itself.
        experts = min(layer.local_num_experts, layer.moe_config.num_logical_experts)
        self._wanted: list[Key] = [
            (f"{projection}_{tensor}", expert, shard)
            for tensor in _TENSORS
            for expert in range(experts)
            for projection, shards in _SHARDS.items()
            for shard in shards
        ]
        self._come: set[Key] = set()
        for name in dict.fromkeys(key[0] for key in self._wanted):
            parameter = getattr(layer, name)
            parameter.weight_loader = self._watching(name, parameter.weight_loader)

    def check(self) -> None:
        """Look at what has come and start anew, for the next reload.

        Raises:
            ValueError: a tensor is missing; the first is named.
        """
        missing = [key for key in self._wanted if key not in self._come]
        self._come.clear()
        if missing:
            name, expert, shard = missing[0]
            raise ValueError(
                f"{self._name}: {len(missing)} of {len(self._wanted)} tensors did not come, first {name} of expert "
                f"{expert} ({shard}): the checkpoint is damaged or incomplete."
            )

    def _watching(self, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(load)

        @functools.wraps(load)
        def watched(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if given["param"].is_meta:  # counted now, loaded into memory when the layer is complete
                self._note(name, given)
            return load(*args, **kwargs)

        return watched

    def _note(self, name: str, given: dict[str, Any]) -> None:
        if given["loaded_weight"].dim() == 3:  # all experts at once
            experts = range(len(given["loaded_weight"]))
        else:
            experts = range(given["expert_id"], given["expert_id"] + 1)
        for expert in experts:
            key = name, expert, given["shard_id"]
            if key in self._come:
                raise ValueError(
                    f"{self._name}: {name} of expert {expert} ({key[2]}) came twice: the checkpoint holds it in two places."
                )
            self._come.add(key)
