# SPDX-License-Identifier: Apache-2.0
"""How a CSF checkpoint's quantization config reaches vLLM: as its source's, or as a refusal."""

from __future__ import annotations

import copy

import pytest
from csf.checkpoints import QUANTIZATION

ROOT = "/models/csf"
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.experts": {
            "quant_algo": "NVFP4", "group_size": 16, "weight_scale_encoding": "csf",
        },
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    },
}  # fmt: skip
LEGACY = {  # hf_quant_config.json of older ModelOpt
    "producer": {"name": "modelopt", "version": "0.33"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def wrapped(source=QUANTIZATION, **changes):
    made = {
        "quant_method": "nvfp4_csf",
        "format_version": 1,
        "checkpoint_root": ROOT,
        "source_quantization_config": source,
    }
    return copy.deepcopy({**made, **changes})


@pytest.fixture
def config(vllm):
    from vllm.model_executor.layers.quantization.nvfp4_csf import config

    return config


def test_a_wrapped_config_becomes_its_source(config) -> None:
    found = wrapped()
    config.normalize(found)
    assert found.pop(config.KEY) == {"layout": "container", "checkpoint_root": ROOT}
    assert found == QUANTIZATION


def test_ordinary_configs_are_left_alone(config) -> None:
    plain_mixed = copy.deepcopy(MIXED)
    del plain_mixed["quantized_layers"]["model.layers.0.mlp.experts"]["weight_scale_encoding"]
    for ordinary in (QUANTIZATION, LEGACY, plain_mixed, {"quant_method": "fp8"}, {}):
        found = copy.deepcopy(ordinary)
        config.normalize(found)
        assert found == ordinary


@pytest.mark.parametrize("given", [wrapped(), MIXED, wrapped(LEGACY)])
def test_normalising_twice_changes_nothing(config, given) -> None:
    once = copy.deepcopy(given)
    config.normalize(once)
    twice = copy.deepcopy(once)
    config.normalize(twice)
    assert once == twice
    assert config.KEY in once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2 and this vLLM reads 1"),
        ({"format_version": None}, "format_version is None"),
        ({"checkpoint_root": "relative/path"}, "absolute path on this machine"),
        ({"checkpoint_root": "s3://bucket/csf"}, "absolute path on this machine"),
        ({"checkpoint_root": None}, "absolute path on this machine"),
        ({"source_quantization_config": None}, "source's quantization config has to be there"),
    ],
)
def test_incomplete_configs_are_refused(config, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        config.normalize(wrapped(**changes))


def test_unknown_scale_encodings_are_refused(config) -> None:
    unknown = copy.deepcopy(MIXED)
    unknown["quantized_layers"]["model.layers.0.mlp.experts"]["weight_scale_encoding"] = "csf2"
    with pytest.raises(
        ValueError, match="weight_scale_encoding is 'csf2' and this vLLM reads 'csf'"
    ):
        config.normalize(unknown)


@pytest.mark.parametrize(
    ("given", "name", "class_name"),
    [
        (wrapped(), "modelopt_fp4", "ModelOptNvFp4Config"),
        (
            wrapped({**QUANTIZATION, "quant_algo": "W4A16_NVFP4"}),
            "modelopt_fp4",
            "ModelOptNvFp4Config",
        ),
        (wrapped(MIXED), "modelopt_mixed", "ModelOptMixedPrecisionConfig"),
    ],
)
def test_registered_method_makes_the_sources_config(config, given, name, class_name) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    made = get_quantization_config("nvfp4_csf").from_config(given)
    assert (made.get_name(), type(made).__name__) == (name, class_name)
    assert config.checkpoint_of(made) == config.CsfCheckpoint(config.Path(ROOT), True)


def test_registered_method_refuses_other_sources(config) -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    with pytest.raises(ValueError, match="come from ModelOpt NVFP4 ones"):
        get_quantization_config("nvfp4_csf").from_config(wrapped({"quant_method": "fp8"}))
    with pytest.raises(ValueError, match="needs a CSF checkpoint"):
        get_quantization_config("nvfp4_csf")()


def test_the_index_layout_needs_a_local_folder(config, tmp_path) -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

    made = ModelOptMixedPrecisionConfig.from_config(copy.deepcopy(MIXED))
    with pytest.raises(ValueError, match="some/hub-name is not a local folder"):
        config.attach(made, MIXED, "some/hub-name")
    config.attach(made, MIXED, str(tmp_path))
    assert config.checkpoint_of(made) == config.CsfCheckpoint(tmp_path, False)


def test_user_asking_for_csf_on_an_ordinary_checkpoint_is_refused(config) -> None:
    ask = config.Nvfp4CsfConfig.override_quantization_method
    with pytest.raises(ValueError, match="VLLM_B12X_CSF_COMPRESS=1 to compress its scales at load"):
        ask(QUANTIZATION, "nvfp4_csf")
    normalised = wrapped()
    config.normalize(normalised)
    assert ask(normalised, "nvfp4_csf") is None
    assert ask(QUANTIZATION, None) is None


@pytest.mark.parametrize(
    ("text", "compress", "prefetch"),
    [
        ("", False, True),
        ("1", True, True),
        ("0", False, False),
        ("on", True, True),
        ("1.5k", False, True),
    ],
)
def test_switches(vllm, text: str, compress: bool, prefetch: bool) -> None:
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    names = (settings.COMPRESS, settings.PREFETCH, settings.RAISE_MAIN_STREAM)
    found = settings.parse_settings(dict.fromkeys(names, text))
    assert found == settings.CsfSettings(compress, prefetch, raise_main_stream=prefetch)


def test_switches_are_registered_with_vllm(vllm) -> None:
    """An unregistered VLLM_ name warns or stops the start."""
    from vllm import envs
    from vllm.model_executor.layers.quantization.nvfp4_csf import settings

    names = {settings.COMPRESS, settings.PREFETCH, settings.RAISE_MAIN_STREAM}
    assert names <= set(envs.environment_variables)


def test_older_mixed_precision_is_found_without_its_file(config, tmp_path) -> None:
    """What `convert-csf --serving-folder` writes for layers that only hf_quant_config.json named, by vLLM's own
    look-up: the map at the top keeps it from searching for that file."""
    from types import SimpleNamespace

    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    nested = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": []}
    found = wrapped(
        {"producer": {"name": "modelopt"}, "quantization": nested, "quantized_layers": layers}
    )
    config.normalize(found)
    model = SimpleNamespace(
        quantization="modelopt_mixed", quantization_config=None, model=str(tmp_path), hf_overrides={},
        hf_config=SimpleNamespace(quantization_config=found),
    )  # fmt: skip
    made = get_quant_config(model, LoadConfig())
    assert made.quantized_layers == layers
    assert config.checkpoint_of(made) == config.CsfCheckpoint(config.Path(ROOT), True)
