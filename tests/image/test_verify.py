# SPDX-License-Identifier: Apache-2.0
"""The single-file programs, and verify on a real patched package without its compiled files.

What needs the whole wheel and a container (all RECORD rows, tampering inside an image) is in docker/prove.
"""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from b12x_overlay.image import integrity, programs
from b12x_overlay.image.expected import from_checkout
from support.paths import SCRIPTS, site

MODELOPT = "vllm/model_executor/layers/quantization/modelopt.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two programs, alone in a folder."""
    folder = tmp_path_factory.mktemp("programs")
    programs.write(folder, from_checkout())
    return folder


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A site folder with the touched modules of a real stock package, their RECORD rows, and the patch set applied."""
    target = small_package(tmp_path / "site")
    apply = [sys.executable, SCRIPTS / "apply-patches", "apply", "--target", target, "-q"]
    subprocess.run(apply, check=True, capture_output=True)
    return target


def small_package(target: Path) -> Path:
    """The files of the stock package that the patch set touches, and a few more."""
    stock = site("stock")
    names = [*from_checkout().before, "vllm/__init__.py", "vllm/envs.py", "vllm/version.py"]
    for name in dict.fromkeys(names):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(stock / name, target / name)
    info = target / "vllm-0.33.0.dist-info"
    shutil.copytree(stock / info.name, info)
    rows = (info / "RECORD").read_text().splitlines()
    kept = [row for row in rows if (target / row.split(",")[0]).is_file()]
    (info / "RECORD").write_text("\n".join(kept) + "\n")
    return target


def run(program: Path, *paths: Path, flags: tuple[str, ...] = ("--json",)) -> tuple[int, dict]:  # type: ignore[type-arg]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    result = subprocess.run(
        [sys.executable, program, *flags], env=environment, cwd="/", capture_output=True, text=True, check=False
    )  # fmt: skip
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, json.loads(result.stdout) if "--json" in flags else {}


def test_the_programs_are_one_file_each_and_the_same_every_time(made: Path) -> None:
    expected = from_checkout()
    for name in programs.PROGRAMS:
        assert programs.build(name, expected) == (made / name).read_bytes()
        assert os.access(made / name, os.X_OK)
        result = subprocess.run(
            [sys.executable, "-I", "-S", made / name, "--help"], cwd="/", capture_output=True, text=True, check=False
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert "exit codes:" in result.stdout


def test_a_patched_package(made: Path, package: Path) -> None:
    code, verdict = run(made / "verify", package)
    assert (code, verdict["state"], verdict["faults"]) == (0, "patched", [])
    assert verdict["patchset"] == from_checkout().patchset


def test_a_stock_package(made: Path, tmp_path: Path) -> None:
    code, verdict = run(made / "verify", small_package(tmp_path))
    assert (code, verdict["state"], verdict["patchset"]) == (1, "stock", None)


def test_no_package_and_another_version(made: Path, package: Path) -> None:
    assert run(made / "verify")[1]["state"] == "absent"
    info = package / "vllm-0.33.0.dist-info"
    text = (info / "METADATA").read_text().replace("Version: 0.33.0", "Version: 0.32.0")
    (info / "METADATA").write_text(text)
    assert run(made / "verify", package)[1]["state"] == "other-version"


def test_a_half_patched_package_names_both_kinds_of_files(made: Path, package: Path) -> None:
    shutil.copy2(site("stock") / MODELOPT, package / MODELOPT)
    (package / "vllm" / "b12x_patchset.py").unlink()
    code, verdict = run(made / "verify", package)
    faults = {fault["path"]: fault["what"] for fault in verdict["faults"]}
    assert (code, verdict["state"]) == (1, "modified")
    assert faults[MODELOPT] == "not patched"
    assert faults["vllm/b12x_patchset.py"] == "missing"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("vllm/envs.py", "edited"),
        ("vllm/version.py", "missing"),
        ("vllm/new.py", "added"),
        ("vllm/__init__.py", "link"),
    ],
)
def test_files_that_the_patch_set_does_not_touch_count_too(
    made: Path, package: Path, name: str, what: str
) -> None:
    path = package / name
    if what == "missing":
        path.unlink()
    elif what == "link":  # the same bytes, but elsewhere
        path.rename(package / "elsewhere.py")
        path.symlink_to(package / "elsewhere.py")
        what = "missing"
    else:
        path.write_bytes((path.read_bytes() if path.exists() else b"") + b"#")
    code, verdict = run(made / "verify", package)
    assert (code, verdict["state"]) == (1, "modified")
    assert [fault["path"] for fault in verdict["faults"]] == [name]
    assert what in verdict["faults"][0]["what"]


@pytest.mark.parametrize(
    "mode", ["CHECKED_HASH", "UNCHECKED_HASH", "TIMESTAMP"]
)  # fmt: skip
def test_only_bytecode_that_python_would_use_counts(made: Path, package: Path, mode: str) -> None:
    """Bytecode of other source is a fault if Python would load it: without a check, or with a time and size that fit."""
    source, other = package / MODELOPT, package / "other.py"
    text = source.read_bytes()
    other.write_bytes(b"x = 1\n".ljust(len(text), b"#"))  # the same size
    os.utime(other, (source.stat().st_atime, source.stat().st_mtime))
    py_compile.compile(
        str(other), cache_from_source(str(source)), invalidation_mode=py_compile.PycInvalidationMode[mode]
    )  # fmt: skip
    other.unlink()
    _, verdict = run(made / "verify", package)
    assert verdict["state"] == ("patched" if mode == "CHECKED_HASH" else "modified")


def test_right_bytecode_is_no_fault(made: Path, package: Path) -> None:
    for mode in py_compile.PycInvalidationMode:
        py_compile.compile(str(package / MODELOPT), invalidation_mode=mode)
        assert run(made / "verify", package)[1]["state"] == "patched"


def test_another_package_earlier_on_the_path(made: Path, package: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "vllm"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    _, verdict = run(made / "verify", other.parent, package)
    assert verdict["state"] == "modified"
    assert any(str(other) in fault["path"] for fault in verdict["faults"])


def test_a_mount_over_the_package_is_seen(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"36 35 98:0 / {package}/vllm/envs.py rw - ext4 /dev/root rw\n36 35 98:0 / / rw - ext4 /dev/root rw\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: lines)
    assert [fault.path for fault in integrity._mounts(package / "vllm")] == [
        f"{package}/vllm/envs.py"
    ]


def test_an_edited_manifest_is_a_fault(made: Path, package: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text('{"schema": "b12x-overlay-image/1", "content_id": "0", "inputs": {}}')
    code, verdict = run(made / "verify", package, flags=("--json", "--manifest", str(path)))
    assert (code, verdict["state"]) == (1, "modified")
    assert "edited" in verdict["faults"][0]["what"]


def test_the_doctor_as_one_file_knows_the_patched_package(made: Path, package: Path) -> None:
    _, report = run(made / "doctor", package, site("b12x-flashinfer"))
    assert report["vllm"]["state"] == "patched"
    assert report["b12x"]["provider"] == "flashinfer-python"
