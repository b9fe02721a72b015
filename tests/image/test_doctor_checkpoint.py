# SPDX-License-Identifier: Apache-2.0
"""Calibration and recipe of expert layers, read from safetensors headers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from b12x_overlay.doctor import checkpoint
from b12x_overlay.doctor.safetensors import CheckpointError

from image.checkpoints import NVFP4, W4A16, calibrated, scales, weights, write

GATE = "model.layers.0.mlp.experts.2.gate_proj.input_scale"


def read_one(folder: Path) -> checkpoint.ExpertLayer:
    return checkpoint.read(folder).layers[0]


def test_a_calibrated_checkpoint(tmp_path: Path) -> None:
    read = checkpoint.read(calibrated(tmp_path))
    assert [layer.name for layer in read.layers] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    assert all(layer.calibration.calibrated and layer.recipe == "NVFP4" for layer in read.layers)
    assert {layer.experts for layer in read.layers} == {4}
    assert not read.csf


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.0"),
        (-0.5, "-0.5"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "no gate input scale"),
    ],
)
def test_one_bad_scale_in_one_half_of_one_expert_is_enough(
    tmp_path: Path, value: float | None, words: str
) -> None:
    tensors = weights(0) | scales(0)
    if value is None:
        del tensors[GATE]
    else:
        tensors[GATE] = torch.tensor(value)
    layer = read_one(write(tmp_path, tensors, NVFP4))
    assert not layer.calibration.calibrated
    assert words in layer.calibration.reason
    assert "expert 2" in layer.calibration.reason


@pytest.mark.parametrize("value", [1.0, 1e-44])
def test_placeholder_and_values_without_a_reciprocal(tmp_path: Path, value: float) -> None:
    tensors = weights(0) | scales(0)
    tensors[GATE] = torch.tensor(value)
    layer = read_one(write(tmp_path, tensors, NVFP4))
    assert not layer.calibration.calibrated
    assert ("placeholder" in layer.calibration.reason) == (value == 1.0)


def test_no_scales_at_all(tmp_path: Path) -> None:
    layer = read_one(write(tmp_path, weights(0), W4A16))
    assert (layer.recipe, layer.calibration.reason) == ("W4A16_NVFP4", "no input scales")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scales_of_other_float_types(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights(0) | {name: scale.to(dtype) for name, scale in scales(0).items()}
    assert read_one(write(tmp_path / "good", tensors, NVFP4)).calibration.calibrated
    tensors[GATE] = torch.tensor(float("nan"), dtype=dtype)
    assert "nan" in read_one(write(tmp_path / "bad", tensors, NVFP4)).calibration.reason


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 2), ()])
def test_scales_of_all_experts_in_one_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    both = torch.full(shape, 0.01)
    base = weights(0)
    names = [
        f"model.layers.0.mlp.experts.{name}"
        for name in ("gate_up_proj_input_scale", "down_proj_input_scale")
    ]
    tensors = {**base, names[0]: both, names[1]: torch.full((4,), 0.02)}
    assert read_one(write(tmp_path / "good", tensors, NVFP4)).calibration.calibrated
    both = both.clone()
    both.view(-1)[-1] = 0
    tensors[names[0]] = both
    assert not read_one(write(tmp_path / "bad", tensors, NVFP4)).calibration.calibrated


def test_mixed_precision_with_weight_only_draft_layer(tmp_path: Path) -> None:
    quant = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
            "model.layers.1.mlp.gate_proj": {"quant_algo": "nvfp4"},
            "model.layers.2.mlp.experts.0.gate_proj": {"quant_algo": "W4A16_NVFP4"},
        },
    }
    tensors = weights(0) | scales(0) | weights(1) | scales(1) | weights(2)
    layers = checkpoint.read(write(tmp_path, tensors, quant)).layers
    assert [(layer.recipe, layer.draft) for layer in layers] == [
        ("NVFP4", False),
        ("NVFP4", False),
        ("W4A16_NVFP4", True),
    ]


def test_recipes_are_those_that_vllm_resolves(tmp_path: Path) -> None:
    """The real ModelOptMixedPrecisionConfig on the same config and prefixes."""
    vllm = pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    quant = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["lm_head", "model.layers.3*"],
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
            "model.layers.1.mlp.gate_proj": {"quant_algo": "W4A16_NVFP4"},
            "model.layers.2.mlp.experts.7.w1": {"quant_algo": "FP8"},
            "model.layers.30.mlp.experts": {"quant_algo": "NVFP4"},
        },
    }
    real = vllm.ModelOptMixedPrecisionConfig.from_config(quant)
    ours = checkpoint.quantconfig.read({"quantization_config": quant}, None)
    for index in (0, 1, 2, 3, 4, 30):
        prefix = f"model.layers.{index}.mlp.experts"
        wanted = None if real.is_layer_excluded(prefix) else real._resolve_quant_algo(prefix)
        assert ours.recipe(prefix) == (wanted or "unquantized"), prefix


def test_nvfp4_without_quantized_activations_is_weight_only(tmp_path: Path) -> None:
    quant = {
        **NVFP4,
        "config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}},
    }
    assert read_one(calibrated(tmp_path, quant=quant)).recipe == "W4A16_NVFP4"


def test_the_older_config_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, weights(0) | scales(0), None)
    legacy = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(legacy))
    assert read_one(tmp_path).recipe == "NVFP4"


def test_multimodal_config_and_csf_streams(tmp_path: Path) -> None:
    prefix = "model.language_model."
    tensors = weights(0, prefix=prefix) | scales(0, prefix=prefix)
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        del tensors[name]
        tensors[f"{name}.nvfp4_csf_fixed"] = torch.zeros(4, dtype=torch.uint8)
        tensors[f"{name}.nvfp4_csf_exceptions"] = torch.zeros(0, dtype=torch.uint32)
    read = checkpoint.read(write(tmp_path, tensors, NVFP4, text_config={"num_hidden_layers": 1}))
    assert read.csf
    assert not read.quant.csf  # the config does not say so: the doctor names that as a misread
    assert not read.layers[0].draft


def test_unequal_weight_global_scales_are_counted(tmp_path: Path) -> None:
    tensors = weights(0) | scales(0)
    assert read_one(write(tmp_path / "equal", tensors, NVFP4)).gate_up == (0, 1.0)
    tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale_2"] = torch.tensor(1e-2)
    tensors["model.layers.0.mlp.experts.3.gate_proj.weight_scale_2"] = torch.tensor(2e-3)
    tensors["model.layers.0.mlp.experts.2.down_proj.weight_scale_2"] = torch.tensor(5.0)
    count, ratio = read_one(write(tmp_path / "unequal", tensors, NVFP4)).gate_up
    assert (count, round(ratio, 3)) == (2, 10.0)


def _cut_short(folder: Path) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _not_safetensors(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\n"
    )


def _header_no_json(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{")


def _missing(folder: Path) -> None:
    (folder / "model-00003-of-00003.safetensors").unlink()


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{,")


def _bad_entry(folder: Path) -> None:
    header = json.dumps({GATE: {"dtype": "F32", "shape": [], "data_offsets": [0]}}).encode()
    (folder / "model-00002-of-00003.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header
    )


def _no_float(folder: Path) -> None:
    header = json.dumps({GATE: {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\1"
    (folder / "model-00002-of-00003.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 5),
        ("quantization_config", "nvfp4"),
        ("quantization_config", {"quant_method": "modelopt", "ignore": 7}),
        ("quantization_config", {"quant_method": "modelopt", "quantization": {"quantized_layers": []}}),
        ("quantization_config", {"quant_method": "nvfp4_csf", "source_quantization_config": {"ignore": "x"}}),
        ("text_config", {"quantization_config": {"quant_method": "modelopt", "config_groups": [1]}}),
    ],
)  # fmt: skip
def test_a_config_field_of_another_kind_is_an_error_that_names_it(
    tmp_path: Path, field: str, value: object
) -> None:
    folder = calibrated(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=r"config\.json: .* is .*, wanted") as error:
        checkpoint.read(folder)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut_short, "cut short"),
        (_not_safetensors, "not a safetensors file"),
        (_header_no_json, "not valid JSON"),
        (_missing, "model-00003-of-00003.safetensors"),
        (_no_config, "config.json"),
        (_bad_config, "config.json"),
        (_bad_entry, "malformed"),
        (_no_float, "no float tensor"),
    ],
)
def test_a_damaged_checkpoint_is_an_error_that_names_the_file(
    tmp_path: Path, damage: Any, words: str
) -> None:
    folder = calibrated(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=words) as error:
        checkpoint.read(folder)
    assert str(folder) in str(error.value)


def test_a_repository_name_is_found_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    calibrated(snapshot)
    reference = tmp_path / "hub" / "models--org--name" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    assert checkpoint.locate("org/name", {"HF_HOME": str(tmp_path)}) == snapshot
    assert checkpoint.locate("org/name", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == snapshot
    with pytest.raises(CheckpointError, match="other/name"):
        checkpoint.locate("other/name", {"HF_HOME": str(tmp_path)})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.locate(str(snapshot / "config.json"), {})
