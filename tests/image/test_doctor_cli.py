# SPDX-License-Identifier: Apache-2.0
"""The command line of doctor, whole: exit codes, --json, and what a user reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from b12x_overlay.doctor import settings
from support.paths import SCRIPTS, site

from image.checkpoints import calibrated

ON = {settings.ARM: "1", settings.FORCE_A16: "1"}
SERVE = ("--moe-backend", "b12x", "-tp", "2")


def doctor(
    *arguments: object, paths: tuple[Path, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "B12X_", "CUDA_", "HF_"))
    }
    return subprocess.run(
        [sys.executable, SCRIPTS / "doctor", *map(str, arguments)],
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environ},
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> tuple[Path, ...]:
    """The patched vllm, b12x, and the other packages that vllm pins, as far as their metadata goes."""
    pins = {"torch": "2.14.0", "nvidia_cutlass_dsl": "4.8.0"}
    for name, version in pins.items():
        info = tmp_path / "pins" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return tmp_path / "pins", site("patched"), site("b12x-flashinfer")


def test_everything_asked_for_will_work(server: tuple[Path, ...], tmp_path: Path) -> None:
    model = calibrated(tmp_path / "model")
    command = ("--assume-gpu", "12.0", "--json", "--", "vllm", "serve", model, *SERVE)
    result = doctor(*command, paths=server, **ON)
    report = json.loads(result.stdout)
    problems = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert (result.returncode, report["works"], problems) == (0, True, [])
    rows = {row["name"]: row for row in report["features"]}
    assert rows["A4 prefill"]["active"] is True
    assert report["vllm"]["state"] == "patched"
    assert report["checkpoint"]["layers"][0]["calibration"]["calibrated"] is True
    assert "everything asked for will work" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({settings.FORCE_A16: "0"}, settings.FORCE_A16),
        ({settings.ARM: "1k"}, "not an integer"),
    ],
)
def test_one_thing_wrong_is_exit_1(
    server: tuple[Path, ...], tmp_path: Path, change: dict[str, str], words: str
) -> None:
    model = calibrated(tmp_path / "model")
    command = ("--assume-gpu", "12.0", "--", "vllm", "serve", model, *SERVE)
    result = doctor(*command, paths=server, **{**ON, **change})
    assert result.returncode == 1
    assert words in result.stdout
    assert "->" in result.stdout


def test_a_stock_vllm_and_missing_packages() -> None:
    # -S: without the test environment's own torch.
    result = subprocess.run(
        [sys.executable, "-S", SCRIPTS / "doctor", "--json"],
        env={"PYTHONPATH": os.pathsep.join(map(str, (site("stock"), site("b12x-flashinfer"))))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(result.stdout)
    levels = {finding["text"]: finding["level"] for finding in report["findings"]}
    assert (result.returncode, report["vllm"]["state"]) == (1, "stock")
    assert levels["vllm needs torch 2.14.0, none is installed"] == "problem"


def test_a_model_that_is_nowhere_is_not_decided(server: tuple[Path, ...], tmp_path: Path) -> None:
    result = doctor(
        "--assume-gpu", "12.1", "--json", "--", "vllm", "serve", "some/model", *SERVE,
        paths=server, HF_HOME=str(tmp_path), **ON,
    )  # fmt: skip
    report = json.loads(result.stdout)
    rows = {row["name"]: row for row in report["features"]}
    assert (result.returncode, rows["A4 prefill"]["active"]) == (1, None)
    assert any("some/model" in finding["text"] for finding in report["findings"])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--nope",), 2),
        (("--assume-gpu", "big"), 2),
        (("--assume-gpu", "12"), 2),  # 12.0 cut short, not SM12
        (("--check", "x"), 2),  # no abbreviations
        (("--checkpoint", "/nowhere"), 1),
        (("--", "vllm", "serve", "m", "--moe-backend"), 1),
        (("--help",), 0),
    ],
)
def test_bad_input_is_said_and_never_a_traceback(arguments: tuple[str, ...], code: int) -> None:
    result = doctor(*arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_variables_before_the_command_count(server: tuple[Path, ...], tmp_path: Path) -> None:
    model = calibrated(tmp_path / "model")
    line = [f"{name}={value}" for name, value in ON.items()]
    options = ("--assume-gpu", "12.0", "--json", "--")
    for words in (line, ["env", *line]):
        result = doctor(*options, *words, "vllm", "serve", model, *SERVE, paths=server)
        report = json.loads(result.stdout)
        rows = {row["name"]: row for row in report["features"]}
        assert (result.returncode, rows["A4 prefill"]["active"]) == (0, True)


def test_colour_only_where_it_is_wanted() -> None:
    assert "\x1b[" not in doctor().stdout
    assert "\x1b[" in doctor("--color", "always").stdout
    assert "\x1b[" not in doctor("--color", "never").stdout
