# SPDX-License-Identifier: Apache-2.0
"""A small repository with the two lines parted, as most tests start."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from sync.repos import Repo


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """main and beta at one commit; neither is checked out."""
    made = Repo.create(tmp_path / "repo")
    made.git("switch", "-q", "--detach")
    return made


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work trees of conflicts, which stay on purpose, go with the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
