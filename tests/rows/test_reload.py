# SPDX-License-Identifier: Apache-2.0
"""Weight reload into the same addresses, and what sleep leaves: outcomes on the real layerwise reload of vLLM."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.alive import distinct_tensors

from rows import harness


def tensors(prepared: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that prepared experts own, by name."""
    import dataclasses

    for field in dataclasses.fields(prepared):
        value = getattr(prepared, field.name)
        if isinstance(value, torch.Tensor):
            yield f"{path}{field.name}", value
        elif dataclasses.is_dataclass(value) and hasattr(value, "workspace"):
            yield from tensors(value, f"{path}{field.name}.")
        elif dataclasses.is_dataclass(value) and hasattr(value, "value"):
            yield from tensors(value.value, f"{path}{field.name}.value.")


def addresses(layer: Any) -> dict[str, int]:
    experts = harness.experts_of(layer)
    found = {name: tensor.data_ptr() for name, tensor in tensors(experts._prepared_experts)}
    if experts._packed_experts is not None:
        found |= {f"packed {name}": t.data_ptr() for name, t in tensors(experts._packed_experts)}
    return found


def make_reloadable(**options: Any) -> tuple[Any, Any]:
    """``(model, layer)``: a loaded layer whose metadata vLLM recorded, as its loader does for every model."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = torch.nn.Module()
    model.experts = layer = harness.make_layer("NVFP4", options.pop("geometry", harness.SMALL))
    record_metadata_for_reloading(model)
    harness.fill(layer, 0)
    layer.quant_method.process_weights_after_loading(layer)
    return model, layer


def checkpoint(
    seed: int, geometry: Any, scales: bool = True
) -> list[tuple[str, int, str, torch.Tensor]]:
    """``(parameter, expert, shard, tensor)`` of another checkpoint, as the weight iterator brings them."""
    donor = harness.make_layer("NVFP4", geometry)
    harness.fill(donor, seed)
    entries = []
    for name, parameter in donor.named_parameters():
        if "input_scale" in name and not scales:
            continue
        for expert in range(geometry.E):
            if name.startswith("w13"):
                halves = parameter.data[expert].chunk(2)
                entries += [
                    (name, expert, shard, half)
                    for shard, half in zip(("w1", "w3"), halves, strict=True)
                ]
            else:
                entries.append((name, expert, "w2", parameter.data[expert]))
    return entries


def reload_weights(
    model: Any, layer: Any, entries: list[tuple[str, int, str, torch.Tensor]]
) -> None:
    from types import SimpleNamespace

    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    for name, expert, shard, value in entries:
        parameter = getattr(layer, name)
        parameter.weight_loader(
            parameter, value.squeeze(), f"experts.{name}", shard_id=shard, expert_id=expert
        )
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))


def fresh(seed: int, geometry: Any = harness.SMALL) -> Any:
    layer = harness.make_layer("NVFP4", geometry)
    harness.fill(layer, seed)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def mixed(layer: Any, geometry: Any = harness.SMALL) -> torch.Tensor:
    with harness.step(20, [(4, 16)]):
        return harness.call(layer, harness.make_batch(20, geometry))


@pytest.mark.parametrize("keep_packed", [None, "1"])
def test_reload_twice(switches: Any, reference: Any, keep_packed: str | None) -> None:
    """Addresses stay, results are those of the new weights, and the proof behind shared quantisation is renewed
    (without it the next A4 call raises; upstream's own reuse would have kept both copies at the second reload)."""
    switches(arm="1", force_a16="1", keep_packed=keep_packed)
    model, layer = make_reloadable()
    before = addresses(layer)
    first = mixed(layer)
    for seed in (1, 2, 3):
        reload_weights(model, layer, checkpoint(seed, harness.SMALL))
        assert addresses(layer) == before
        experts = harness.experts_of(layer)
        assert experts._prepared_experts.can_share_input(input_scales_static=True)
        after = mixed(layer)
        assert after.equal(mixed(fresh(seed)))
        assert not after.equal(first)


def test_replay_equals_eager_after_a_reload(armed: None, reference: Any) -> None:
    """A captured graph is a binding whose tensors keep their addresses: replaying one that was made before the
    reload gives the new weights' results."""
    model, layer = make_reloadable()
    batch = harness.make_batch(4)
    experts = harness.experts_of(layer)
    scratch = torch.empty(experts._scratch_nbytes(4, 2), dtype=torch.uint8)
    captured: list[Any] = []
    run = reference.run
    reference.run = lambda *, binding: captured.append(binding) or run(binding=binding)
    output = torch.empty_like(batch.x)
    experts._launch(False, scratch, batch.x, batch.weights, batch.ids, output)
    reference.run = run
    (binding,) = captured
    old = output.clone()
    reload_weights(model, layer, checkpoint(1, harness.SMALL))
    binding.run()
    with harness.step(None):
        eager = harness.call(layer, batch)
    assert output.equal(eager)
    assert not output.equal(old)


def test_reload_without_scales_keeps_the_first_loads(
    armed: None, reference: Any, a4_log: list[logging.LogRecord]
) -> None:
    """A trainer that pushes weights only: the layer stays armed, and garbage does not become a calibration."""
    model, layer = make_reloadable()
    experts = harness.experts_of(layer)
    scales = [
        experts._prepared_experts.a1_gscale.clone(),
        experts._prepared_experts.a2_gscale.clone(),
    ]
    a4_log.clear()
    reload_weights(model, layer, checkpoint(1, harness.SMALL, scales=False))
    experts = harness.experts_of(layer)
    assert type(experts).__name__ == "DualPlanExperts"
    assert experts._prepared_experts.a1_gscale.equal(scales[0])
    assert experts._prepared_experts.a2_gscale.equal(scales[1])
    (record,) = a4_log
    assert record.levelno == logging.WARNING
    assert "those of the first load" in record.getMessage()


def test_reload_never_arms(armed: None, reference: Any) -> None:
    """The armed set is the first load's: graphs and the other ranks rely on it."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = torch.nn.Module()
    model.experts = layer = harness.make_layer("NVFP4", harness.SMALL)
    record_metadata_for_reloading(model)
    harness.fill(layer, 0, calibrated=False)
    layer.quant_method.process_weights_after_loading(layer)
    reload_weights(model, layer, checkpoint(1, harness.SMALL))
    assert type(harness.experts_of(layer)).__name__ == "B12xExperts"


def test_sleep_level_2_then_reload(armed: None, reference: Any) -> None:
    """Level 2 drops what lay in device memory; addresses come back with undefined content and a reload fills all of
    it: weights, alphas, activation scales, the kernels' lock words."""
    model, layer = make_reloadable()
    before = addresses(layer)
    for _, tensor in tensors(harness.experts_of(layer)._prepared_experts):
        tensor.data.view(torch.uint8).fill_(0xA5)
    reload_weights(model, layer, checkpoint(1, harness.SMALL))
    assert addresses(layer) == before
    assert mixed(layer).equal(mixed(fresh(1)))
    workspace = harness.experts_of(layer)._prepared_experts.representation.workspace
    assert not workspace.any()


def test_sleep_level_2_then_reload_without_scales(armed: None, reference: Any) -> None:
    """The first load's scales survive on the host."""
    model, layer = make_reloadable()
    expected = harness.experts_of(layer)._prepared_experts.a2_gscale.clone()
    for _, tensor in tensors(harness.experts_of(layer)._prepared_experts):
        tensor.data.view(torch.uint8).fill_(0xA5)
    reload_weights(model, layer, checkpoint(1, harness.SMALL, scales=False))
    assert harness.experts_of(layer)._prepared_experts.a2_gscale.equal(expected)


def test_real_library(armed: None) -> None:
    """The bundled b12x: same addresses and a renewed proof over two reloads."""
    geometry = harness.Geometry()
    model, layer = make_reloadable(geometry=geometry)
    before = addresses(layer)
    for seed in (1, 2):
        reload_weights(model, layer, checkpoint(seed, geometry))
        experts = harness.experts_of(layer)
        assert addresses(layer) == before
        assert experts._prepared_experts.can_share_input(input_scales_static=True)
        expected = harness.experts_of(fresh(seed, geometry))._prepared_experts
        for (name, ours), (_, theirs) in zip(
            tensors(experts._prepared_experts), tensors(expected), strict=True
        ):
            assert ours.view(torch.uint8).equal(theirs.view(torch.uint8)), name


def test_other_layout_is_refused(armed: None, reference: Any) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4.storage import ReloadError, reuse_storage

    current = harness.experts_of(fresh(0))._prepared_experts
    other = harness.experts_of(fresh(0, harness.Geometry(E=4, H=128, I=128)))._prepared_experts
    copy = current.w1_fp4.clone()
    with pytest.raises(ReloadError, match="Restart the server"):
        reuse_storage(current, other, "model.layers.0.mlp.experts")
    assert current.w1_fp4.equal(copy), "nothing may be copied before all of it fits"


def test_a_model_that_goes_takes_its_weights_along(armed: None, reference: Any) -> None:
    """Plans are kept per process, for every model; held by them, a layer's weights would stay on the device."""
    layer = fresh(0)
    mixed(layer)
    experts = harness.experts_of(layer)
    weights = [weakref.ref(tensor) for _, tensor in tensors(experts._prepared_experts)]
    del layer, experts
    gc.collect()
    assert [ref() for ref in weights if ref() is not None] == []


def test_a_reload_leaves_one_copy_of_everything(armed: None, reference: Any) -> None:
    """The reloaded block scales, copied into the first load's, must not live on beside them: gigabytes per rank."""
    model, layer = make_reloadable()
    sizes = {t.numel() for _, t in tensors(harness.experts_of(layer)._prepared_experts)}
    large = {size for size in sizes if size > 1000}
    before = distinct_tensors(large)
    reload_weights(model, layer, checkpoint(1, harness.SMALL))
    assert distinct_tensors(large) == before
