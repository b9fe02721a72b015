# SPDX-License-Identifier: Apache-2.0
"""Compression at load: a tensor that does not come, or comes twice, stops the start; vLLM alone would serve memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from csf.method_support import loaded, run


def finish(layer: Any) -> None:
    """What the loader does at the end with layers that are not complete."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    finalize_layerwise_processing(layer, SimpleNamespace(dtype=torch.bfloat16))


@pytest.mark.parametrize("shard", ["w1", "w2"])
@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2"])
def test_a_missing_tensor_is_named(csf, shard: str, suffix: str) -> None:
    tensors = csf.layers.checkpoint_tensors()
    del tensors[2, shard, suffix]
    layer = csf.layers.load(csf.layers.make_compressing(), tensors, process=False)
    name = f"w2_{suffix}" if shard == "w2" else f"w13_{suffix}"
    with pytest.raises(
        ValueError,
        match=rf"layers\.0\.mlp\.experts: 1 of 36 tensors did not come, first {name} of expert 2 ",
    ):
        finish(layer)


def test_a_layer_of_which_nothing_came_is_named(csf) -> None:
    with pytest.raises(ValueError, match="36 of 36 tensors did not come, first w13_weight of"):
        finish(csf.layers.make_compressing())


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2"])
def test_a_tensor_that_comes_twice_is_named(csf, suffix: str) -> None:
    """Counted as progress, it would close the layer before its last tensor."""
    tensors = csf.layers.checkpoint_tensors()
    layer = csf.layers.make_compressing()
    csf.layers.load(layer, {(1, "w3", suffix): tensors[1, "w3", suffix]}, process=False)
    with pytest.raises(ValueError, match=rf"w13_{suffix} of expert 1 \(w3\) came twice"):
        csf.layers.load(layer, tensors, process=False)


@pytest.mark.parametrize("second", [0, 5])
def test_a_reload_is_looked_at_like_the_first_load(csf, second: int) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import (
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    tensors = csf.layers.checkpoint_tensors(seed=second)
    fresh = loaded(csf, "compress", 0, tensors=tensors)
    layer = csf.layers.make_compressing(1)
    record_metadata_for_reloading(layer)
    csf.layers.load(layer, csf.layers.checkpoint_tensors(seed=0), process=False)
    initialize_layerwise_reload(layer)
    csf.layers.load(layer, tensors, process=False)
    finish(layer)
    assert torch.equal(run(csf, layer, False), run(csf, fresh, False))
    del tensors[3, "w2", "weight"]
    initialize_layerwise_reload(layer)
    csf.layers.load(layer, tensors, process=False)
    with pytest.raises(
        ValueError, match="1 of 36 tensors did not come, first w2_weight of expert 3"
    ):
        finish(layer)
