# SPDX-License-Identifier: Apache-2.0
"""The test environment itself: downloads are checked, folders are made whole or not at all, and only when needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from b12x_overlay import bootstrap
from b12x_overlay.testenv import sites, wheels
from support.paths import REPO


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build folder."""
    monkeypatch.setenv("B12X_OVERLAY_BUILD", str(tmp_path))
    return tmp_path


def test_wrong_download_is_refused_and_removed(build: Path) -> None:
    wheel = wheels.provider_wheel("b12x-pypi")
    path = build / "sources" / wheel.filename
    path.parent.mkdir()
    path.write_bytes(b"not the wheel")
    with pytest.raises(bootstrap.SetupError, match=wheel.sha256):
        wheels.fetch(wheel)
    assert not path.exists()


def test_failed_download_says_what_to_do(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(build))
    with pytest.raises(bootstrap.SetupError, match=r"put the file into .*sources"):
        wheels.fetch(wheels.provider_wheel("b12x-pypi"))


def test_a_vllm_wheel_for_each_supported_machine() -> None:
    assert wheels.vllm_wheel("x86_64").sha256 != wheels.vllm_wheel("aarch64").sha256
    with pytest.raises(bootstrap.SetupError, match="riscv64"):
        wheels.vllm_wheel("riscv64")


def test_folder_is_made_once_and_remade_when_its_source_changes(build: Path) -> None:
    made: list[str] = []

    def make(text: str) -> None:
        def write(to: Path) -> None:
            made.append(text)
            (to / "file").write_text(text)

        sites.site("").mkdir(parents=True, exist_ok=True)
        sites._ensure("thing", text, write)

    make("one")
    make("one")
    assert made == ["one"]
    make("two")
    assert (sites.site("thing") / "file").read_text() == "two"
    assert sorted(p.name for p in sites.site("").iterdir()) == ["thing"]


def test_failed_making_leaves_the_old_folder(build: Path) -> None:
    def works(to: Path) -> None:
        (to / "file").write_text("whole")

    def fails(to: Path) -> None:
        (to / "file").write_text("half")
        raise OSError("disk full")

    sites.site("").mkdir(parents=True)
    sites._ensure("thing", "one", works)
    with pytest.raises(OSError, match="disk full"):
        sites._ensure("thing", "two", fails)
    assert (sites.site("thing") / "file").read_text() == "whole"
    sites._ensure("thing", "two", works)


@pytest.mark.parametrize("change", ["content", "name", "new file"])
def test_patched_tree_follows_patches_and_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    file = tmp_path / "overlay" / "vllm" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text("A = 1\n")
    (tmp_path / "patches").mkdir()
    monkeypatch.setattr(sites, "REPO", tmp_path)
    monkeypatch.setattr(sites, "OVERLAY", tmp_path / "overlay")
    monkeypatch.setattr(sites, "PATCHES", tmp_path / "patches")
    before = sites.patch_set_digest()
    (file.parent / "__pycache__").mkdir()
    (file.parent / "__pycache__" / "module.pyc").write_bytes(b"\0")
    assert sites.patch_set_digest() == before
    if change == "content":
        file.write_text("A = 2\n")
    elif change == "name":
        file.rename(file.with_name("other.py"))
    else:
        (tmp_path / "patches" / "x.patch").write_text("")
    assert sites.patch_set_digest() != before


def test_environment_follows_both_requirement_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "REQUIREMENTS", tmp_path)
    (tmp_path / "x.txt").write_text("a==1\n")
    plain = bootstrap.environment("x")
    (tmp_path / "x-nodeps.txt").write_text("b==1\n")
    with_more = bootstrap.environment("x")
    (tmp_path / "x-nodeps.txt").write_text("b==2\n")
    assert len({plain, with_more, bootstrap.environment("x")}) == 3


def test_warnings_are_shown_while_the_command_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """pip retries an index that it cannot reach for minutes."""
    code = "print('quiet'); print('WARNING: Retrying\\n' * 9, flush=True); raise SystemExit({})"
    bootstrap._run([sys.executable, "-c", code.format(0)], "hint")
    assert capfd.readouterr().err == "  WARNING: Retrying\n" * bootstrap.MOST_WARNINGS
    with pytest.raises(bootstrap.SetupError, match=r"hint\nquiet\nWARNING: Retrying"):
        bootstrap._run([sys.executable, "-c", code.format(1)], "hint")


def test_every_requirement_is_pinned() -> None:
    for file in (REPO / "scripts" / "requirements").glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            requirement = line.partition("#")[0].strip()
            assert not requirement or "==" in requirement, f"{file.name}: {line}"


def test_help_needs_no_environment(build: Path) -> None:
    env = {"PATH": os.environ["PATH"], "B12X_OVERLAY_BUILD": str(build)}
    command = [sys.executable, str(REPO / "scripts" / "test"), "--help"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "-m rows" in result.stdout
    assert not any(build.iterdir())


def test_the_patched_tree_is_the_applied_patch_set() -> None:
    """What the other tests run on: status of the folder that scripts/test made, read from its bytes."""
    command = [
        sys.executable,
        str(REPO / "scripts" / "apply-patches"),
        "status",
        "--target",
        str(sites.site("patched")),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
