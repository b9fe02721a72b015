# SPDX-License-Identifier: Apache-2.0
"""What the tests of CSF layers share: making them, running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

WAYS = pytest.mark.parametrize("way", ["compress", "streams"])
MODES = pytest.mark.parametrize("armed", [False, True], ids=["w4a16", "a4"])


def loaded(csf: Any, way: str, number: int = 0, tensors: Any = None, **more: Any) -> Any:
    """A CSF layer with the weights of seed *number*."""
    tensors = csf.layers.checkpoint_tensors(seed=number) if tensors is None else tensors
    if way == "streams":
        return csf.layers.load(
            csf.layers.make_streams(number, **more), csf.layers.as_streams(tensors)
        )
    return csf.layers.load(csf.layers.make_compressing(number, **more), tensors, process=False)


def ordinary(csf: Any, monkeypatch: Any, number: int = 0) -> Any:
    """The same layer from plain scales with upstream's method."""
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "0")
    settings.get_settings.cache_clear()
    layer = csf.layers.load(
        csf.layers.make_ordinary(number), csf.layers.checkpoint_tensors(seed=number)
    )
    assert type(layer.quant_method).__name__ == "ModelOptNvFp4FusedMoE"
    return layer


def run(csf: Any, layer: Any, prefill: bool, seed: int = 0, rows: int = 24) -> torch.Tensor:
    ranges = [(0, rows)] if prefill else []
    with csf.harness.step(rows, ranges):
        return csf.harness.call(layer, csf.harness.make_batch(rows, csf.layers.SMALL, seed))


def scratch_addresses(layer: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in layer.nvfp4_csf.scratch]
