# SPDX-License-Identifier: Apache-2.0
"""``convert-csf --serving-folder``, and the serve command that is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from b12x_overlay.csf import cli
from csf import checkpoints
from csf.convert_support import (
    BOOKKEEPING,
    files_of,
    run,
)


def test_a_serving_folder_holds_files_named_like_the_bookkeeping(
    named_like_bookkeeping: Path, made: Path, tmp_path: Path
) -> None:
    assert run("--serving-folder", made, tmp_path / "serve") == 0
    for name in BOOKKEEPING:
        assert (tmp_path / "serve" / name).read_text() == f'{{"user": "{name}"}}'


MIXED = "MIXED_PRECISION"


@pytest.mark.parametrize(
    ("algorithms", "is_forced"),
    [
        (["NVFP4"], True),
        (["W4A16_NVFP4"], False),
        ([MIXED, "NVFP4", "FP8"], True),
        ([MIXED, "W4A16_NVFP4", "FP8"], False),
        ([MIXED, "W4A16_NVFP4", "NVFP4"], True),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_the_serve_command_forces_w4a16_where_the_source_needs_it(
    source: Path, tmp_path: Path, capsys, algorithms, is_forced, nested
) -> None:
    quantization = {"quant_algo": algorithms[0]}
    if algorithms[1:]:
        quantization["quantized_layers"] = {
            f"model.layers.{number}.mlp.experts": {"quant_algo": name}
            for number, name in enumerate(algorithms[1:])
        }
    if nested:
        quantization = {"quantization": quantization}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    (source / "config.json").write_text(json.dumps(config))
    assert run(source, tmp_path / "csf") == 0
    capsys.readouterr()
    assert cli.main(["--serving-folder", str(tmp_path / "csf"), str(tmp_path / "serve")]) == 0
    force = "VLLM_B12X_MOE_FP4_FORCE_A16=1 " if is_forced else ""
    assert capsys.readouterr().out == (
        f"{force}vllm serve {tmp_path / 'serve'} --quantization nvfp4_csf --load-format nvfp4_csf "
        "--moe-backend b12x\n"
    )


def test_a_serving_folder_takes_no_weights(source: Path, tmp_path: Path, capsys) -> None:
    """Weights in another form beside the index, as Mistral's repositories have them."""
    weights = {
        "consolidated.safetensors", "consolidated.safetensors.index.json", "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json", "model-Q4.GGUF",
    }  # fmt: skip
    others = {"chat_template.jinja", "tokenizer.model", "generation_config.json", "params.json"}
    for name in weights | others:
        (source / name).write_text(name)
    assert run(source, tmp_path / "csf") == 0
    capsys.readouterr()
    assert cli.main(["--serving-folder", str(tmp_path / "csf"), str(tmp_path / "serve")]) == 0
    said = capsys.readouterr().err
    found = {path.name for path in (tmp_path / "serve").iterdir()}
    assert found == others | {"config.json", "tokenizer.json"}
    assert "left out, weights" in said and all(name in said for name in weights)
    assert run("--restore", tmp_path / "csf", tmp_path / "back") == 0
    assert files_of(tmp_path / "back") == files_of(source)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_serving_folder_of_damaged_metadata_is_refused(
    made: Path, tmp_path: Path, capsys, name: str
) -> None:
    path = made / "metadata" / name
    path.write_bytes(path.read_bytes() + b" ")
    assert run("--serving-folder", made, tmp_path / "serve") == 1
    assert f"{path}: SHA-256 differs from manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "serve").exists()


def test_serving_folder_names_the_container(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "serve"
    assert run("--serving-folder", made, folder) == 0
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert quantization == {
        "quant_method": "nvfp4_csf",
        "format_version": 1,
        "checkpoint_root": str(made),
        "source_quantization_config": checkpoints.QUANTIZATION,
    }
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("in_config", [True, False])
def test_serving_folder_names_the_layers_of_mixed_precision(source, tmp_path, in_config) -> None:
    """Where config.json does not name them vLLM reads hf_quant_config.json, which a serving folder has not."""
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    nested = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": []}
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    if in_config:
        short = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        config["quantization_config"] = short
    (source / "config.json").write_text(json.dumps(config))
    (source / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": nested})
    )
    assert run(source, tmp_path / "csf") == 0
    assert run("--serving-folder", tmp_path / "csf", tmp_path / "serve") == 0
    written = json.loads((tmp_path / "serve" / "config.json").read_text())["quantization_config"]
    assert written["source_quantization_config"] == {
        "producer": {"name": "modelopt"},
        "quantization": nested,
        "quant_method": "modelopt",
        "quantized_layers": layers,
    }


def test_serving_folder_of_a_config_with_an_empty_text_config(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    quantization = {
        "quantization": config.pop("quantization_config"),
        "producer": {"name": "modelopt"},
    }
    (source / "config.json").write_text(json.dumps({**config, "text_config": None}))
    (source / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert run(source, tmp_path / "csf") == 0
    assert run("--serving-folder", tmp_path / "csf", tmp_path / "serve") == 0
    written = json.loads((tmp_path / "serve" / "config.json").read_text())["quantization_config"]
    assert written["source_quantization_config"]["producer"] == {"name": "modelopt"}
