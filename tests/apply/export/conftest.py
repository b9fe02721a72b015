# SPDX-License-Identifier: Apache-2.0
"""A git identity, a checkout, and one whose series was exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from apply.checkouts import CONFIG, git
from apply.factory import Project, place

IDENTITY = {"GIT_CONFIG_NOSYSTEM": "1"}


@pytest.fixture(autouse=True)
def needs_git() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")


@pytest.fixture(autouse=True)
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git identity, and nothing of this machine's configuration."""
    config = place(tmp_path, "gitconfig", CONFIG.encode())
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def made(made: Project, build: Path, identity: None, tmp_path: Path) -> Project:
    made.env |= {
        "B12X_OVERLAY_BUILD": str(build),
        "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"),
        **IDENTITY,
    }
    return made


@pytest.fixture
def checkout(tree: Path, identity: None) -> Path:
    """The original tree as a git checkout."""
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "vLLM")
    return tree


@pytest.fixture
def exported(made: Project, checkout: Path) -> Path:
    """A checkout with one commit per patch, and patches/ in the form that export writes."""
    assert made.run("--target", checkout, "--commit").code == 0
    result = made.run("export", "--target", checkout)
    assert result.code == 0, result.text
    return checkout
