# SPDX-License-Identifier: Apache-2.0
"""The arming table: each row starts up the real ModelOpt method, loader function, B12xExperts and bundled b12x."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.moe_layer import Geometry, make_layer

from rows import harness

GEOMETRY = Geometry()
DUAL, STOCK = "DualPlanExperts", "B12xExperts"


def loaded(number: int = 0, algo: str = "NVFP4", calibrated: bool = True, **more: Any) -> Any:
    layer = make_layer(algo, GEOMETRY, prefix=f"model.layers.{number}.mlp.experts", **more)
    # Whatever the allocator left: create_weights must not let it pass for a calibration.
    harness.fill(layer, number, calibrated)
    return layer


def kind(layer: Any) -> tuple[str, str]:
    experts = harness.experts_of(layer)
    return type(experts).__name__, experts._quant_mode


def lines(log: list[logging.LogRecord]) -> str:
    return "\n".join(record.getMessage() for record in log)


def test_calibrated_with_force_a16_is_armed(armed: None, a4_log: list[logging.LogRecord]) -> None:
    layers = [loaded(0), loaded(1)]
    harness.start(*layers)
    assert [kind(layer) for layer in layers] == [(DUAL, "w4a16")] * 2
    assert not harness.warnings(a4_log)
    summary = lines(a4_log)
    assert "2 of 2 MoE layers armed" in summary
    assert "flashinfer-python" in summary


def test_off_takes_the_unpatched_path(
    switches: Callable[..., None], a4_log: list[logging.LogRecord]
) -> None:
    for value in (None, "0", "-4", "", " "):
        switches(arm=value, force_a16="1")
        layer = loaded()
        harness.start(layer)
        assert kind(layer) == (STOCK, "w4a16"), value
    assert not a4_log


def test_without_force_a16(switches: Callable[..., None], a4_log: list[logging.LogRecord]) -> None:
    switches(arm="1")
    layers = [loaded(0), loaded(1)]
    harness.start(*layers)
    assert [kind(layer) for layer in layers] == [(STOCK, "nvfp4")] * 2
    (warning,) = harness.warnings(a4_log)
    assert "VLLM_B12X_MOE_FP4_FORCE_A16" in warning
    assert "model.layers.0.mlp.experts, model.layers.1.mlp.experts" in warning


@pytest.mark.parametrize("leftover", [5.2e-32, 0.01, float("nan")])
def test_weight_only_is_never_armed(
    armed: None, a4_log: list[logging.LogRecord], leftover: float
) -> None:
    layer = loaded(algo="W4A16_NVFP4", calibrated=False)
    layer.w13_input_scale.data.fill_(leftover)
    layer.w2_input_scale.data.fill_(leftover)
    harness.start(layer)
    assert kind(layer) == (STOCK, "w4a16")
    assert lines(a4_log).count("W4A16_NVFP4") == 1


def test_mixed_precision(armed: None, a4_log: list[logging.LogRecord]) -> None:
    """Target layers calibrated, MTP layers weight-only: normal, so INFO, and the line names the layer."""
    layers = [loaded(0), loaded(1)]
    mtp = loaded(2, algo="W4A16_NVFP4", calibrated=False)
    harness.start(*layers, mtp)
    assert [kind(layer) for layer in (*layers, mtp)] == [(DUAL, "w4a16")] * 2 + [(STOCK, "w4a16")]
    assert not harness.warnings(a4_log)
    assert "2 of 3 MoE layers armed" in lines(a4_log)
    assert "model.layers.2.mlp.experts not armed: weight-only layer" in lines(a4_log)


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_draft_model_is_not_armed(armed: None, a4_log: list[logging.LogRecord], algo: str) -> None:
    layer = loaded(3, algo=algo, calibrated=algo == "NVFP4")
    harness.start(layer, draft=True)
    assert kind(layer) == (STOCK, "w4a16")
    assert not harness.warnings(a4_log)
    assert "draft model: none of 1" in lines(a4_log)
    assert "model.layers.3.mlp.experts" in lines(a4_log)
    target = loaded(0)
    harness.start(target)
    assert kind(target) == (DUAL, "w4a16"), "a draft model must not disarm the next one"


def test_other_backend(armed: None, a4_log: list[logging.LogRecord]) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import arming, report

    layers = [make_layer("NVFP4", GEOMETRY, backend="emulation") for _ in range(2)]
    for layer in layers:
        harness.fill(layer)
        arming.arm_layer(layer.quant_method, layer)
        assert getattr(layer, "b12x_dual_plan", None) is None
    report.finish_model(torch.nn.ModuleList(layers), is_draft=False)
    (warning,) = harness.warnings(a4_log)
    assert "--moe-backend b12x" in warning
    assert "EMULATION" in warning


def test_compressed_tensors(armed: None, a4_log: list[logging.LogRecord]) -> None:
    """Their input scales are ``torch.empty`` and reach the layer as reciprocals of whatever was there."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (
        CompressedTensorsW4A4Nvfp4MoEMethod,
    )

    layers = []
    for number in range(2):
        layer = make_layer("W4A16_NVFP4", GEOMETRY, prefix=f"model.layers.{number}.mlp.experts")
        moe = layer.quant_method.moe
        for name in [name for name, _ in layer.named_parameters()]:
            delattr(layer, name)
        layer.quant_method = CompressedTensorsW4A4Nvfp4MoEMethod(
            moe, layer.layer_name, use_a16=True
        )
        layer.quant_method.create_weights(
            layer, num_experts=GEOMETRY.E, hidden_size=GEOMETRY.H, intermediate_size_per_partition=GEOMETRY.I,
            params_dtype=GEOMETRY.dtype, weight_loader=lambda *args, **kwargs: None,
        )  # fmt: skip
        for name, parameter in layer.named_parameters():
            if parameter.dtype == torch.uint8:
                parameter.data.random_(0, 256)
            elif name.endswith("_weight_scale"):
                parameter.data.copy_(torch.ones(parameter.shape))
            else:
                parameter.data.fill_(0.01)
        layers.append(layer)
    harness.start(*layers)
    assert [kind(layer) for layer in layers] == [(STOCK, "w4a16")] * 2
    assert lines(a4_log).count("compressed-tensors") == 1


BAD = [0.0, -1e-2, float("nan"), float("inf"), 1.0, 1e-45]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("where", ["gate", "up", "w2"])
def test_one_unusable_value_disarms_its_layer(
    armed: None, a4_log: list[logging.LogRecord], value: float, where: str
) -> None:
    """A missing half hides behind upstream's maximum over gate and up; the other layer stays armed."""
    broken, whole = loaded(0), loaded(1)
    scale = (
        broken.w2_input_scale
        if where == "w2"
        else broken.w13_input_scale[:, ("gate", "up").index(where)]
    )
    scale.data[5] = value
    harness.start(broken, whole)
    assert [kind(broken), kind(whole)] == [(STOCK, "w4a16"), (DUAL, "w4a16")]
    (warning,) = harness.warnings(a4_log)
    assert "model.layers.0.mlp.experts not armed" in warning
    assert f"in 1 of {GEOMETRY.E} experts" in warning


def test_all_ones_is_upstreams_placeholder(armed: None) -> None:
    layer = loaded()
    layer.w13_input_scale.data.fill_(1.0)
    layer.w2_input_scale.data.fill_(1.0)
    harness.start(layer)
    assert kind(layer) == (STOCK, "w4a16")


def test_scales_that_b12x_gets(armed: None) -> None:
    """FC1: the smallest reciprocal over experts and halves, for every expert; FC2: the reciprocal per expert."""
    layer = loaded()
    w13, w2 = layer.w13_input_scale.data.clone(), layer.w2_input_scale.data.clone()
    w13[3, 1] = 0.5  # the widest calibrated range, in one half of one expert
    layer.w13_input_scale.data.copy_(w13)
    harness.start(layer)
    prepared = harness.experts_of(layer)._prepared_experts
    assert prepared.a1_gscale.equal(torch.full((GEOMETRY.E,), 2.0))
    assert prepared.a2_gscale.equal(1.0 / w2)
    assert prepared.can_share_input(input_scales_static=True)
    assert prepared.w1_alphas.equal(prepared.representation.value.w13_global_scale / 2.0)


def test_zero_copy(armed: None) -> None:
    layer = loaded()
    harness.start(layer)
    prepared = harness.experts_of(layer)._prepared_experts
    native = prepared.representation.value
    for name, ours in (("w13", "w1"), ("w2", "w2")):
        weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
        assert (
            weight.data_ptr()
            == getattr(prepared, f"{ours}_fp4").data_ptr()
            == getattr(native, name).data_ptr()
        )
        assert scale.data_ptr() == getattr(prepared, f"{ours}_blockscale").data_ptr()
        assert scale.data_ptr() == getattr(native, f"{name}_scale").data_ptr()
    assert native.w13_layout == "w13"


@pytest.mark.parametrize("what", ["router weights", "needs silu"])
def test_layers_that_a4_cannot_run(armed: None, a4_log: list[logging.LogRecord], what: str) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    layer = loaded(apply_router_weight_on_input=what == "router weights")
    if what == "needs silu":
        layer.activation = MoEActivation.SWIGLUOAI_UNINTERLEAVE
    harness.start(layer)
    assert kind(layer)[0] == STOCK
    assert what in harness.warnings(a4_log)[0]


def test_fp16_is_not_armed(armed: None, a4_log: list[logging.LogRecord]) -> None:
    layer = make_layer("NVFP4", Geometry(dtype=torch.float16))
    harness.fill(layer)
    harness.start(layer)
    assert kind(layer) == (STOCK, "w4a16")
    assert "torch.float16" in harness.warnings(a4_log)[0]


def test_unequal_gate_and_up_scales_are_reported(
    armed: None, a4_log: list[logging.LogRecord]
) -> None:
    layer = loaded()
    layer.w13_weight_scale_2.data[2, 1] *= 10
    harness.start(layer)
    assert kind(layer)[0] == DUAL
    (warning,) = harness.warnings(a4_log)
    assert "differ in 1 experts" in warning
    assert "factor of 10" in warning


@pytest.mark.parametrize(
    ("eager", "mode", "words"),
    [
        (None, "FULL_AND_PIECEWISE", "Steps of up to 512 rows replay CUDA graphs (FULL_AND_PIECEWISE)"),
        (None, "FULL", "Steps of up to 512 rows replay CUDA graphs (FULL)"),
        (None, "PIECEWISE", "Steps of up to 512 rows replay CUDA graphs (PIECEWISE)"),
        (None, "FULL_DECODE_ONLY", "CUDA graphs (FULL_DECODE_ONLY) replay decode-only steps: prefill rows run A4"),
        ("1", "FULL_AND_PIECEWISE", "bypass CUDA graphs"),
        (None, "NONE", "No CUDA graphs"),
    ],
)  # fmt: skip
def test_summary_says_what_graphs_replay(
    switches: Callable[..., None],
    a4_log: list[logging.LogRecord],
    eager: str | None,
    mode: str,
    words: str,
) -> None:
    from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config

    switches(arm="1", force_a16="1", eager=eager)
    config = VllmConfig()
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    config.compilation_config.max_cudagraph_capture_size = 512
    layer = loaded()
    with set_current_vllm_config(config):
        harness.start(layer)
    (line,) = [r for r in a4_log if "armed" in r.getMessage()]
    assert line.levelno == logging.INFO
    assert words in line.getMessage()


@pytest.mark.parametrize(("rank", "shown"), [(0, 1), (1, 0)])
def test_one_rank_shows_the_summary(
    armed: None,
    a4_log: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    shown: int,
) -> None:
    from vllm.distributed import parallel_state

    layer = loaded()
    group = SimpleNamespace(rank_in_group=rank, world_size=1, rank=rank)
    monkeypatch.setattr(parallel_state, "_TP", group)
    harness.start(layer)
    assert len([r for r in a4_log if "layers armed" in r.getMessage()]) == shown


def test_no_moe_layers(armed: None, a4_log: list[logging.LogRecord]) -> None:
    harness.start()
    assert "this model's use none at all" in harness.warnings(a4_log)[0]


def test_layers_of_another_method_are_named(armed: None, a4_log: list[logging.LogRecord]) -> None:
    from vllm.model_executor.layers.fused_moe.b12x_a4 import report
    from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkNvfp4MoEMethod

    model = torch.nn.Module()
    model.quant_method = QuarkNvfp4MoEMethod.__new__(QuarkNvfp4MoEMethod)
    report.finish_model(model, is_draft=False, quantization="quark")
    (warning,) = harness.warnings(a4_log)
    assert "only MoE layers of ModelOpt NVFP4 checkpoints can be" in warning
    assert "this model's use QuarkNvfp4MoEMethod" in warning


@pytest.mark.parametrize("flag", ["--offload-group-size", "--cpu-offload-gb"])
def test_weight_offloading_stops_the_start(armed: None, flag: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    if flag == "--cpu-offload-gb":
        config.offload_config.uva.cpu_offload_gb = 4
    else:
        config.offload_config.prefetch.offload_group_size = 2
    with set_current_vllm_config(config), pytest.raises(ValueError, match=flag):
        harness.start(loaded())


def test_configuration_without_row_types_is_not_armed(
    armed: None, a4_log: list[logging.LogRecord]
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.cache_config.kv_sharing_fast_prefill = True
    layer = loaded()
    with set_current_vllm_config(config):
        harness.start(layer)
    assert kind(layer) == (STOCK, "w4a16")
    assert "--kv-sharing-fast-prefill" in lines(a4_log)


def test_keep_packed_holds_both(switches: Callable[..., None]) -> None:
    switches(arm="1", force_a16="1", keep_packed="1")
    layer = loaded()
    harness.start(layer)
    experts = harness.experts_of(layer)
    packed, native = experts._packed_experts, experts._prepared_experts
    assert packed.plan.quant_modes == {"w4a16"}
    assert packed.w1_fp4.data_ptr() != native.w1_fp4.data_ptr()
    assert native.w1_fp4.data_ptr() == layer.w13_weight.data_ptr()
    stock = loaded()
    switches(force_a16="1")
    harness.start(stock)
    expected = harness.experts_of(stock)._prepared_experts
    assert packed.w1_fp4.equal(expected.w1_fp4), "packed weights must be upstream's"
    assert packed.w2_blockscale.view(torch.uint8).equal(expected.w2_blockscale.view(torch.uint8))
