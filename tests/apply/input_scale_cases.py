# SPDX-License-Identifier: Apache-2.0
"""What becomes of a layer's input scales; called in this process and, on the unpatched tree, in a child."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What the poisoned allocator leaves in new memory: a number that looks like a calibrated input scale.
STALE = 0.03125


def _modules() -> Any:
    from support import moe_layer, sm120

    sm120.install()
    return moe_layer


@contextmanager
def _poisoned_allocator() -> Iterator[None]:
    """torch.empty and torch.empty_strided return memory that an earlier tensor left behind."""
    import torch

    with torch.device("cpu"):
        # The first such context remembers torch's constructors for good; the poisoned ones must not be among them.
        torch.empty(0)
    originals = {name: getattr(torch, name) for name in ("empty", "empty_strided")}

    def poisoned(original: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            if tensor.is_floating_point() and tensor.device.type == "cpu":
                tensor.fill_(STALE)
            return tensor

        return allocate

    for name, original in originals.items():
        setattr(torch, name, poisoned(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _scales(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name).tolist() for name in ("w13_input_scale", "w2_input_scale")}


def created(algo: str) -> dict[str, Any]:
    """The input scales of a new layer."""
    moe_layer = _modules()
    with _poisoned_allocator():
        return _scales(moe_layer.make_layer(algo))


def dummy(algo: str) -> dict[str, Any]:
    """The input scales after ``load_format="dummy"`` filled the layer."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    layer = _modules().make_layer(algo)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(layer, None)
    return _scales(layer)


def _load(layer: Any, absent: dict[str, list[int]] | None, value: float) -> None:
    """Load every parameter through the layer's own weight loader, one expert and shard at a time, as a checkpoint
    does. Input scales are *value* times (1 + expert), but for the experts that *absent* lists per shard ("w1", "w2",
    "w3"); None leaves all of them out."""
    import torch

    I, H = layer.intermediate_size_per_partition, layer.hidden_size
    for expert in range(layer.local_num_experts):
        for shard in ("w1", "w2", "w3"):
            stem = "w2" if shard == "w2" else "w13"
            rows, columns = (H, I) if shard == "w2" else (I, H)
            tensors = {
                "weight": torch.full((rows, columns // 2), 0x21, dtype=torch.uint8),
                "weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
                "weight_scale_2": torch.tensor(1e-3),
            }
            if absent is not None and expert not in absent.get(shard, []):
                tensors["input_scale"] = torch.tensor(value * (1 + expert))
            for name, tensor in tensors.items():
                parameter = getattr(layer, f"{stem}_{name}")
                parameter.weight_loader(
                    parameter,
                    tensor,
                    f"{stem}_{name}",
                    shard_id=shard,
                    expert_id=expert,
                    return_success=True,
                )


def first_load(
    algo: str, absent: dict[str, list[int]] | None, value: float = 0.01, backend: str = "b12x"
) -> dict[str, Any]:
    """The scales after loading, before conversion; and the error of ``process_weights_after_loading``, if any."""
    moe_layer = _modules()
    with _poisoned_allocator():
        layer = moe_layer.make_layer(algo, backend=backend)
        _load(layer, absent, value)
        loaded = _scales(layer)
        return {"loaded": loaded, **_process(layer)}


def reloaded(algo: str, absent: dict[str, list[int]] | None, value: float = 0.02) -> dict[str, Any]:
    """Load, convert, then reload layer by layer with *absent* and *value*: what conversion sees, and what stays."""
    import torch
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    moe_layer = _modules()
    model = torch.nn.Module()
    model.experts = layer = moe_layer.make_layer(algo)
    record_metadata_for_reloading(model)
    _load(layer, {} if algo == "NVFP4" else None, 0.01)
    layer.quant_method.process_weights_after_loading(layer)
    addresses = [layer.w13_input_scale.data_ptr(), layer.w2_input_scale.data_ptr()]

    seen: dict[str, Any] = {}
    convert = layer.quant_method.process_weights_after_loading

    def observe(module: torch.nn.Module) -> None:
        seen.update(_scales(module))
        convert(module)

    layer.quant_method.process_weights_after_loading = observe
    error = None
    with _poisoned_allocator():
        initialize_layerwise_reload(model)
        try:
            _load(layer, absent, value)
            finalize_layerwise_reload(model, None)
        except ValueError as raised:
            error = str(raised)
    same = error is None and addresses == [
        layer.w13_input_scale.data_ptr(),
        layer.w2_input_scale.data_ptr(),
    ]
    return {"loaded": seen, "error": error, "same_storage": same}


def _process(layer: Any) -> dict[str, Any]:
    try:
        layer.quant_method.process_weights_after_loading(layer)
    except ValueError as error:
        return {"error": str(error)}
    config = layer.quant_method.moe_quant_config
    return {
        "error": None,
        "quant_mode": getattr(layer.quant_method.moe_kernel.fused_experts, "_quant_mode", None),
        "a1_gscale": None
        if config.a1_gscale is None
        else [str(v) for v in config.a1_gscale.flatten().tolist()],
        "a2_gscale": None
        if config.a2_gscale is None
        else [str(v) for v in config.a2_gscale.flatten().tolist()],
    }


def all_on_stock() -> dict[str, Any]:
    """The cases of test_input_scales.py that the unpatched tree gets wrong, in one process."""
    import torch

    moe_layer = _modules()
    result: dict[str, Any] = {
        "created": created("W4A16_NVFP4"),
        "weight_only": first_load("W4A16_NVFP4", None),
        "weight_only_reload": reloaded("W4A16_NVFP4", None),
        "absent": first_load("NVFP4", {"w2": [3]}),
    }
    layer = moe_layer.make_layer("NVFP4")
    moe_layer.fill_weights(layer)
    moe_layer.fill_input_scales(layer)
    layer.w2_input_scale.data[3] = torch.zeros(())
    result["absent_zero"] = _process(layer)
    return result
