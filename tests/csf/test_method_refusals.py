# SPDX-License-Identifier: Apache-2.0
"""CSF layers: damaged or missing tensors by name, and set-ups that are refused with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from csf.method_support import WAYS, loaded
from csf.streams import plausible_scales
from nvfp4_csf import codec


def test_missing_streams_are_named(csf) -> None:
    tensors = csf.layers.as_streams(csf.layers.checkpoint_tensors())
    del tensors[2, "w3", "weight_scale"]
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.mlp\.experts: missing CSF tensors: .* 1 projections .* first expert/shard 2/w3",
    ):
        csf.layers.load(csf.layers.make_streams(), tensors)


def test_a_second_tensor_for_one_place_is_refused(csf) -> None:
    layer = csf.layers.make_streams()
    tensors = csf.layers.as_streams(csf.layers.checkpoint_tensors())
    csf.layers.load(layer, tensors, process=False)
    again = {(1, "w2", "weight_scale"): tensors[1, "w2", "weight_scale"].clone()}
    with pytest.raises(ValueError, match="w2_weight_scale: given twice for expert 1"):
        csf.layers.load(layer, again, process=False)


def test_plain_scales_do_not_reach_a_compressed_layer(csf) -> None:
    with pytest.raises(ValueError, match="reached a layer whose scales are compressed"):
        csf.layers.load(csf.layers.make_streams(), csf.layers.checkpoint_tensors())


@WAYS
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("shard", ["w1", "w2"])
def test_bad_global_scales_are_named(csf, way: str, value: float, shard: str) -> None:
    tensors = csf.layers.checkpoint_tensors()
    tensors[3, shard, "weight_scale_2"] = torch.tensor(value)
    name = "w2_weight_scale_2" if shard == "w2" else "w13_weight_scale_2"
    with pytest.raises(
        ValueError, match=rf"layers\.0\.mlp\.experts: {name} of expert 3 is {value}"
    ):
        loaded(csf, way, tensors=tensors)


def test_dummy_weights_get_constant_scales(csf) -> None:
    from vllm.config import set_current_vllm_config

    config = csf.layers.loading_csf("dummy")
    layer = csf.layers.make_streams(vllm_config=config)
    for parameter in (layer.w13_weight_scale_2, layer.w2_weight_scale_2):
        parameter.data.fill_(1e-3)
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
    layer.nvfp4_csf.expansion.expand()
    assert all((t.float() == 1).all() for t in layer.nvfp4_csf.scratch)


def with_config(**changes: Any) -> Any:
    def change(config: Any) -> None:
        for path, value in changes.items():
            holder = config
            *parents, name = path.split("__")
            for parent in parents:
                holder = getattr(holder, parent)
            object.__setattr__(holder, name, value)

    return change


CONFIGURATIONS = [
    (with_config(parallel_config__pipeline_parallel_size=2), "use tensor parallelism only"),
    (with_config(parallel_config__data_parallel_size=2), "start one server per replica"),
    (with_config(parallel_config__enable_expert_parallel=True), "drop --enable-expert-parallel"),
    (with_config(parallel_config__enable_dbo=True), "drop --enable-dbo and --ubatch-size"),
    (with_config(parallel_config__ubatch_size=4), "drop --enable-dbo and --ubatch-size"),
    (with_config(offload_config__prefetch__offload_group_size=2), "drop --offload-group-size"),
    (with_config(offload_config__uva__cpu_offload_gb=4), "drop --cpu-offload-gb"),
]


@WAYS
@pytest.mark.parametrize(("change", "message"), CONFIGURATIONS)
def test_configurations_are_refused_with_what_to_change(
    csf, way: str, change, message: str
) -> None:
    config = csf.layers.loading_csf()
    change(config)
    make = csf.layers.make_streams if way == "streams" else csf.layers.make_compressing
    with pytest.raises(ValueError, match=message) as caught:
        make(vllm_config=config)
    assert ("VLLM_B12X_CSF_COMPRESS" in str(caught.value)) == (way == "compress")
    assert str(caught.value).startswith("NVFP4-CSF: ")


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "runai_streamer"])
def test_other_load_formats_are_refused(csf, load_format: str) -> None:
    with pytest.raises(
        ValueError, match=f"load format '{load_format}' cannot read it: add --load-format nvfp4_csf"
    ):
        csf.layers.make_streams(vllm_config=csf.layers.loading_csf(load_format))


def geometry(csf: Any, **sizes: int) -> dict[str, Any]:
    from dataclasses import replace

    return {"geometry": replace(csf.layers.SMALL, **sizes)}


def test_layers_are_refused_with_what_to_change(csf, monkeypatch) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cases = [
        (geometry(csf, H=192), "hidden size 192 is no multiple of 128"),
        (geometry(csf, I=72), "72 intermediate values per rank are no multiple of 16: use fewer"),
        (geometry(csf, H=8192, I=16448), "use more tensor-parallel ranks"),
        (
            {
                "moe": {
                    "activation": MoEActivation.SITU,
                    "activation_situ_beta": 4.0,
                    "activation_situ_linear_beta": 25.0,
                }
            },
            "activation situ.* is not supported, only silu",
        ),
        ({"moe": {"in_dtype": torch.float16}}, "add --dtype bfloat16"),
        ({"apply_router_weight_on_input": True}, "router weights on the input"),
        ({"backend": "emulation"}, "add --moe-backend b12x"),
    ]
    for make in (csf.layers.make_streams, csf.layers.make_compressing):
        for arguments, message in cases:
            with pytest.raises(
                ValueError, match=rf"NVFP4-CSF: model\.layers\.0\.mlp\.experts: .*{message}"
            ):
                make(**arguments)
    monkeypatch.setenv("VLLM_B12X_MOE_FP4_FORCE_A16", "0")
    with pytest.raises(ValueError, match=r"set VLLM_B12X_MOE_FP4_FORCE_A16=1"):
        csf.layers.make_streams()


@pytest.mark.parametrize("a4_prefill", [False, True])
def test_a_b12x_without_dual_plans_is_refused(csf, a4_prefill: bool) -> None:
    """One that runs A4 over packed weights as well: packing copies the scales' values."""
    from support import reference_b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import provider

    csf.b12x.dual = False
    if a4_prefill:
        csf.b12x.TPMoEScratchPlan = reference_b12x.ReferenceB12x(a4_prefill=True).TPMoEScratchPlan
    provider.get_provider.cache_clear()
    with pytest.raises(ValueError, match=r"NVFP4-CSF: the installed b12x .* cannot"):
        csf.layers.make_streams()


@WAYS
def test_sleep_level_2_is_refused(csf, way: str) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf.refusals import refuse_sleep

    model = torch.nn.ModuleList([loaded(csf, way)])
    refuse_sleep(1, model, None)
    with pytest.raises(ValueError, match="use sleep level 1"):
        refuse_sleep(2, None, model)
    refuse_sleep(2, torch.nn.Linear(1, 1), None)


def test_other_methods_keep_their_layers(csf) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf.method import for_layer

    other = object()
    assert for_layer(other, None, "model.layers.0.mlp.experts") is other
    checkpoint = SimpleNamespace(nvfp4_csf=object())
    csf.inventory.layers = frozenset({(False, 0)})
    assert for_layer(other, checkpoint, "model.layers.1.mlp.experts") is other
    assert for_layer(other, checkpoint, "mtp.layers.0.mlp.experts") is other
    with pytest.raises(ValueError, match="object cannot use them"):
        for_layer(other, checkpoint, "model.layers.0.mlp.experts")


def test_the_codec_of_the_tests_is_the_servers(csf) -> None:
    """Both import paths load the same file."""
    from vllm.model_executor.layers.quantization.nvfp4_csf import codec as served

    scales = plausible_scales(16, 4)
    assert (served.encode(scales).fixed == codec.encode(scales).fixed).all()
