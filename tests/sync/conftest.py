# SPDX-License-Identifier: Apache-2.0
"""A small repository with the two lines parted, as most tests start."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync.repos import Repo


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """main and beta at one commit; neither is checked out."""
    made = Repo.create(tmp_path / "repo")
    made.git("switch", "-q", "--detach")
    return made
