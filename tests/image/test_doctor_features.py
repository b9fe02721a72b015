# SPDX-License-Identifier: Apache-2.0
"""The arming table: what is active for which checkpoint, flags and variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from b12x_overlay.doctor import a4, checkpoint, features, serveargs, settings
from b12x_overlay.doctor import table as rows_of
from b12x_overlay.doctor.abilities import Abilities
from b12x_overlay.doctor.findings import Feature, Level
from b12x_overlay.doctor.provider import Provider

from image.checkpoints import NVFP4, W4A16, calibrated, scales, weights, write

BUNDLED = Provider("flashinfer-python", "0.7.2.post1", abilities=Abilities(True, True, False, True))
OLD = Provider("b12x", "0.1", abilities=Abilities(True, False, False, False))
ON = {settings.ARM: "1", settings.FORCE_A16: "1"}
B12X = ("vllm", "serve", "m", "--moe-backend", "b12x")


def table(
    read: checkpoint.Checkpoint | None,
    command: tuple[str, ...] = B12X,
    environ: dict[str, str] = ON,
    **seen: Any,
) -> dict[str, Feature]:
    given = {"provider": BUNDLED, "patched": True, "gpu_ok": True, **seen}
    switches, _ = settings.read(environ)
    serve, _ = serveargs.parse(list(command))
    rows = rows_of.evaluate(features.Seen(switches, serve, read, **given))
    return {row.name: row for row in rows}


@pytest.fixture
def good(tmp_path: Path) -> checkpoint.Checkpoint:
    return checkpoint.read(calibrated(tmp_path / "good"))


def test_calibrated_with_force_a16_and_b12x_is_armed(good: checkpoint.Checkpoint) -> None:
    a4 = table(good)["A4 prefill"]
    assert (a4.asked, a4.active, a4.fix) == (True, True, "")
    assert "2 of 2 target layers armed" in a4.why
    assert "not armed" not in a4.why


def test_calibrated_without_force_a16_names_it(good: checkpoint.Checkpoint) -> None:
    for environ in ({settings.ARM: "1"}, {**ON, settings.FORCE_A16: "0"}):
        a4 = table(good, environ=environ)["A4 prefill"]
        assert a4.active is False
        assert "W4A4" in a4.why
        assert settings.FORCE_A16 in a4.fix


def test_weight_only_layers_are_never_armed_whatever_the_tensors_hold(tmp_path: Path) -> None:
    read = checkpoint.read(calibrated(tmp_path, quant=W4A16))
    assert all(
        layer.calibration.calibrated for layer in read.layers
    )  # plausible leftovers in the file
    a4 = table(read)["A4 prefill"]
    assert a4.active is False
    assert "weights only" in a4.why


def test_mixed_precision_arms_target_layers_and_not_the_draft(tmp_path: Path) -> None:
    quant = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            **{f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4"} for i in (0, 1)},
            "model.layers.2.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
        },
    }
    tensors = weights(0) | scales(0) | weights(1) | scales(1) | weights(2)
    a4 = table(checkpoint.read(write(tmp_path, tensors, quant)))["A4 prefill"]
    assert a4.active is True
    assert "2 of 2 target layers armed" in a4.why
    assert "1 draft layer W4A16_NVFP4" in a4.why
    assert a4.fix == ""


@pytest.mark.parametrize("backend", ["auto", "marlin", "flashinfer_b12x"])
def test_any_other_backend_names_the_flag(good: checkpoint.Checkpoint, backend: str) -> None:
    rows = table(good, ("vllm", "serve", "m", "--moe-backend", backend))
    for name in ("A4 prefill", "b12x MoE backend"):
        assert rows[name].active is False
        assert "--moe-backend b12x" in rows[name].fix


def test_compressed_tensors_are_never_armed(tmp_path: Path) -> None:
    quant = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    a4 = table(checkpoint.read(calibrated(tmp_path, quant=quant)))["A4 prefill"]
    assert a4.active is False
    assert "compressed-tensors" in a4.why


def test_one_bad_layer_is_named_and_the_others_are_armed(tmp_path: Path) -> None:
    tensors = weights(0) | scales(0) | weights(1) | scales(1)
    tensors["model.layers.1.mlp.experts.3.down_proj.input_scale"] = torch.tensor(0.0)
    a4 = table(checkpoint.read(write(tmp_path, tensors, NVFP4)))["A4 prefill"]
    assert a4.active is True
    assert "1 of 2 target layers armed" in a4.why
    assert "expert 3" in a4.why


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"patched": False}, "patch set"),
        ({"patched": None}, "no vllm"),
        ({"gpu_ok": False}, "SM120"),
        ({"provider": OLD}, "both modes"),
        ({"provider": Provider("none")}, "none"),
    ],
)
def test_what_stands_in_the_way_is_named(
    good: checkpoint.Checkpoint, seen: dict[str, Any], words: str
) -> None:
    a4 = table(good, **seen)["A4 prefill"]
    assert a4.active is False
    assert words in a4.why
    assert a4.fix


@pytest.mark.parametrize(
    "flags",
    [
        ("-dp", "2"),
        ("--data-parallel-size=2",),
        ("--prefill_context_parallel_size", "2"),
        ("--enable-dbo",),
        ("--kv-sharing-fast-prefill",),
        ("--enable-expert-parallel",),
        ("--ubatch-size", "2"),
        ("--cpu-offload-gb", "4"),
    ],
)
def test_set_ups_in_which_all_rows_run_w4a16(
    good: checkpoint.Checkpoint, flags: tuple[str, ...]
) -> None:
    a4 = table(good, (*B12X, *flags))["A4 prefill"]
    assert a4.active is False
    assert "remove --" in a4.fix


def test_all_reasons_are_given_at_once(good: checkpoint.Checkpoint) -> None:
    a4 = table(good, ("serve", "m", "-dp", "2"), {settings.ARM: "1"}, patched=False)["A4 prefill"]
    for words in ("patch set", "--moe-backend", settings.FORCE_A16, "--data-parallel-size"):
        assert words in a4.why


def test_not_asked_for_says_what_it_would_do(good: checkpoint.Checkpoint) -> None:
    a4 = table(good, environ={settings.FORCE_A16: "1"})["A4 prefill"]
    assert (a4.asked, a4.active) == (False, False)
    assert "would arm 2 of 2" in a4.why


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ((), 512),
        (("--max-num-seqs", "16"), 32),
        (("--max-num-seqs", "16", "--speculative-config", '{"num_speculative_tokens": 3}'), 128),
        (("--max-num-batched-tokens", "100"), 100),
        (("-cc.cudagraph_capture_sizes", "[1, 2, 64]"), 64),
        (("--compilation-config", '{"max_cudagraph_capture_size": 24}'), 24),
        (("--enforce-eager",), None),
    ],
)
def test_the_graph_limit(flags: tuple[str, ...], limit: int | None) -> None:
    serve, _ = serveargs.parse(["vllm", "serve", "m", *flags])
    assert a4.graph_limit(serve) == limit


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --moe-backend b12x",
        "serve m --moe_backend=B12X",
        '/opt/bin/vllm serve m --kernel-config {"moe_backend":"b12x"}',
        "vllm serve --kernel-config.moe_backend b12x --model m",
        "m --moe-backend b12x",
        "vllm serve m --served-model-name x y --moe-backend b12x --port 8000",
    ],
)
def test_command_lines_are_read_as_vllm_reads_them(command: str) -> None:
    serve, found = serveargs.parse(command.split())
    assert (serve.moe_backend, serve.model, found) == ("b12x", "m", [])


def test_a_config_file_counts_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\nmoe-backend: b12x  # why\nenforce_eager: true\ndata-parallel-size: 2\nx:\n  y: 1\n"
    )
    serve, found = serveargs.parse(["serve", "--config", str(file), "-dp", "1"])
    assert (serve.model, serve.moe_backend, serve.on("enforce-eager")) == ("m", "b12x", True)
    assert serve.count("data-parallel-size") == 1
    assert [finding.level for finding in found] == [Level.WARNING]  # the nested value is named


@pytest.mark.parametrize(
    "command",
    [
        "serve m --moe-backend",
        "serve m -dp two",
        "serve m --kernel-config {x",
        "serve m --kernel-config [1]",
        "serve m --config /nowhere.yaml",
        'serve m --speculative-config {"num_speculative_tokens":"x"}',
    ],
)
def test_a_malformed_flag_is_a_problem_that_names_it_and_hides_no_other(command: str) -> None:
    serve, found = serveargs.parse([*command.split()[:2], "-pp", "2", *command.split()[2:]])
    assert (serve.model, serve.count("pipeline-parallel-size")) == ("m", 2)
    assert [finding.level for finding in found] == [Level.PROBLEM]
    assert "--" in found[0].text


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("vllm serve m -tp 2", "m"),
        ("/venv/bin/vllm serve m -tp 2", "m"),
        ("m -tp 2", "m"),  # the image's arguments
        ("python3 -m vllm.entrypoints.openai.api_server --model m -tp 2", "m"),
        ("-tp 2", ""),
    ],
)
def test_forms_of_the_command(command: str, model: str) -> None:
    serve, found = serveargs.parse(command.split())
    assert (serve.model, serve.count("tensor-parallel-size"), found) == (model, 2, [])


@pytest.mark.parametrize(
    ("command", "words"), [("vllm bench serve", "'vllm bench'"), ("m other -tp 2", "'other'")]
)
def test_what_is_no_serve_command_is_said(command: str, words: str) -> None:
    _, found = serveargs.parse(command.split())
    assert [finding.level for finding in found] == [Level.PROBLEM]
    assert words in found[0].text


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        (settings.ARM, "1.5k", Level.PROBLEM),
        (settings.ARM, "true", Level.PROBLEM),
        (settings.ARM, "-4", None),
        (settings.ARM, " 1536 ", None),
        (settings.EAGER, "2", Level.PROBLEM),
        (settings.EAGER, "1", Level.WARNING),  # no effect while nothing is armed
        (settings.FORCE_A16, "true", Level.PROBLEM),  # vLLM stops with a ValueError
        ("B12X_W4A16_A4_PREFIL_MIN_TOKENS", "1", Level.PROBLEM),
        ("VLLM_B12X_CSF_COMPRES", "1", Level.PROBLEM),
        (settings.FORK_SWITCH, "1", Level.NOTE),
    ],
)
def test_variables(variable: str, value: str, level: Level | None) -> None:
    switches, found = settings.read({variable: value})
    assert [finding.level for finding in found] == ([level] if level else [])
    assert switches.arm == (value == " 1536 ")
    assert all(variable in finding.text for finding in found)


def container_root(root: Path) -> Path:
    """A container's own folder, without tensors."""
    (root / "metadata").mkdir(parents=True)
    (root / "tensors").mkdir()
    (root / "manifest.json").write_text('{"schema": "lil-nvfp4-csf-checkpoint/1"}')
    (root / "metadata" / "config.json").write_text("{}")
    return root


def test_a_csf_container_needs_its_flags(tmp_path: Path) -> None:
    root = tmp_path / "container"
    (root / "tensors").mkdir(parents=True)
    calibrated(root / "tensors")
    quant = {
        "quant_method": "nvfp4_csf",
        "format_version": 1,
        "checkpoint_root": str(root),
        "source_quantization_config": NVFP4,
    }
    read = checkpoint.read(write(tmp_path / "served", {}, quant))
    assert len(read.layers) == 2
    csf = table(read)["NVFP4-CSF"]
    assert (csf.asked, csf.active) == (True, False)
    assert "--load-format nvfp4_csf" in csf.fix
    bare = checkpoint.read(container_root(tmp_path / "bare"))
    assert "--serving-folder" in table(bare)["NVFP4-CSF"].fix
    flags = ("--quantization", "nvfp4_csf", "--load-format", "nvfp4_csf")
    rows = table(read, (*B12X, *flags))
    assert rows["NVFP4-CSF"].active is True
    assert rows["CSF scale prefetch"].active is True
    assert "on a raised main stream" in rows["CSF scale prefetch"].why
    rows = table(read, (*B12X, *flags), {**ON, settings.RAISE_MAIN_STREAM: "0"})
    assert f"{settings.RAISE_MAIN_STREAM}=0" in rows["CSF scale prefetch"].why
    assert rows["A4 prefill"].active is True  # the source config's recipe counts
    assert (
        table(read, (*B12X, *flags), {**ON, settings.PREFETCH: "0"})["CSF scale prefetch"].active
        is False
    )
    assert table(read, (*B12X, *flags, "-pp", "2"))["NVFP4-CSF"].active is False


def test_csf_streams_that_no_config_names_would_be_misread(tmp_path: Path) -> None:
    tensors = weights(0) | scales(0)
    tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale.nvfp4_csf_fixed"] = torch.zeros(1)
    csf = table(checkpoint.read(write(tmp_path, tensors, NVFP4)))["NVFP4-CSF"]
    assert csf.active is False
    assert "misread" in csf.why


def test_compress_at_load(good: checkpoint.Checkpoint, tmp_path: Path) -> None:
    environ = {**ON, settings.COMPRESS: "1"}
    assert table(good, environ=environ)["NVFP4-CSF"].active is True
    plain = checkpoint.read(write(tmp_path / "plain", weights(0), None))
    assert table(plain, environ=environ)["NVFP4-CSF"].active is False
    without = table(good, environ={settings.COMPRESS: "1"})["NVFP4-CSF"]
    assert settings.FORCE_A16 in without.fix


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 4000}, "128"),
        ({"hidden_act": "relu2"}, "silu"),
        ({"dtype": "float16"}, "--dtype bfloat16"),
        ({"model_type": "llama4_text"}, "router weights"),
        ({"architectures": ["DeepseekV41ForCausalLM"]}, "--no-swa-bounded-replay"),
    ],
)
def test_models_that_the_kernels_do_not_take(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    a4_row = table(checkpoint.read(calibrated(tmp_path, **config)))["A4 prefill"]
    assert a4_row.active is False
    assert words in a4_row.why + a4_row.fix


def test_flags_can_make_it_work(tmp_path: Path) -> None:
    half = checkpoint.read(calibrated(tmp_path / "half", dtype="float16"))
    assert table(half, (*B12X, "--dtype", "bfloat16"))["A4 prefill"].active is True
    replay = checkpoint.read(
        calibrated(tmp_path / "replay", architectures=["DeepseekV41ForCausalLM"])
    )
    assert table(replay, (*B12X, "--no-swa-bounded-replay"))["A4 prefill"].active is True
    assert (
        table(half, (*B12X, "--dtype=bfloat16", "--cpu-offload-gb", "0"))["A4 prefill"].active
        is True
    )


def test_a_calibrated_draft_layer_stays_draft(tmp_path: Path) -> None:
    a4_row = table(checkpoint.read(calibrated(tmp_path, layers=(0, 1, 2))))["A4 prefill"]
    assert "2 of 2 target layers armed" in a4_row.why
    assert "1 draft layer" in a4_row.why
