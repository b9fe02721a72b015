# SPDX-License-Identifier: Apache-2.0
"""The shared scratch is no weight: nobody writes, saves or compares it in the place of a layer's scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from csf.method_support import WAYS, loaded, run


@pytest.fixture
def model(csf, request) -> torch.nn.Module:
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList(loaded(csf, request.param, number) for number in range(2))
    return made


BOTH = pytest.mark.parametrize("model", ["compress", "streams"], indirect=True)


@BOTH
def test_weight_digests_are_those_of_the_planes(csf, model: Any) -> None:
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    first = compute_tensor_digests(model)
    for layer in model.layers:
        run(csf, layer, prefill=False)
        assert compute_tensor_digests(model) == first, "an expansion is no change of weights"
    names = {
        f"w{n}_weight_scale.{part}" for n in (13, 2) for part in ("fixed", "exceptions", "offsets")
    }
    assert names <= {name.removeprefix("layers.1.") for name in first}
    assert first["layers.0.w2_weight_scale.fixed"] != first["layers.1.w2_weight_scale.fixed"]
    planes = model.layers[1].nvfp4_csf.planes[1]
    planes.exceptions[int(planes.offsets[-1]) :] = 7  # slack: an earlier load's words may lie there
    assert compute_tensor_digests(model) == first
    planes.fixed.view(-1)[0] ^= 1
    changed = {
        name for name, digest in compute_tensor_digests(model).items() if digest != first[name]
    }
    assert changed == {"layers.1.w2_weight_scale.fixed"}


@BOTH
def test_weights_in_kernel_format_are_refused(model: Any) -> None:
    """The loop of ``reload_weights(is_checkpoint_format=False)``."""
    from vllm.model_executor.model_loader.reload.inplace import get_parameter_for_reload

    parameter = get_parameter_for_reload(model, "layers.0.w13_weight_scale")
    before = parameter.detach().clone()
    with pytest.raises(RuntimeError, match="reload in checkpoint format"):
        parameter.copy_(torch.zeros_like(before))
    assert torch.equal(parameter.view(torch.uint8), before.view(torch.uint8))


@BOTH
def test_a_state_dict_is_refused(model: Any) -> None:
    """``save_sharded_state`` would write one layer's scales once and drop all others."""
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.experts cannot be saved"):
        model.state_dict()


@WAYS
def test_unequal_gate_and_up_scales_are_reported(csf, caplog, monkeypatch, way: str) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf import preparation

    monkeypatch.setattr(preparation.logger, "propagate", True)
    monkeypatch.setattr(preparation.logger.parent, "propagate", True, raising=False)
    tensors = csf.layers.checkpoint_tensors()
    loaded(csf, way, tensors=dict(tensors))
    assert not [r for r in caplog.records if "gate and up" in r.getMessage()]
    tensors[1, "w3", "weight_scale_2"] = tensors[1, "w3", "weight_scale_2"] * 2
    loaded(csf, way, 1, tensors=tensors)
    (record,) = [r for r in caplog.records if "gate and up" in r.getMessage()]
    assert "layers.1.mlp.experts" in record.getMessage()
    assert "factor of 2;" in record.getMessage()
