# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the apply part."""

from __future__ import annotations

from pathlib import Path

import pytest
from apply.factory import Project, Series, lay, lay_installed, project
from b12x_overlay import bootstrap, paths

A = b"".join(b"line %d\n" % i for i in range(1, 41))
B = b"import os\n\n\ndef run():\n    return 1\n\n\ndef stop():\n    return 2\n"


@pytest.fixture
def series() -> Series:
    """Two patches over two files, one of them patched twice, and two overlay files."""
    first = A.replace(b"line 5\n", b"line five\n").replace(b"line 30\n", b"")
    second = first.replace(b"line 20\n", b"line 20\nline 20 and a half\n")
    made = Series({"vllm/a.py": A, "vllm/sub/b.py": B})
    made.add("first", {"vllm/a.py": first})
    made.add(
        "second",
        {"vllm/a.py": second, "vllm/sub/b.py": B.replace(b"return 1", b"return 7")},
        {"vllm/new/__init__.py": b"", "vllm/new/logic.py": b"ANSWER = 42\n"},
    )
    return made


@pytest.fixture
def made(tmp_path: Path, series: Series) -> Project:
    """A project with that series."""
    return project(tmp_path / "project").write(series)


@pytest.fixture
def tree(tmp_path: Path, series: Series) -> Path:
    """A source tree in its original state."""
    return lay(tmp_path / "tree", series.base)


@pytest.fixture
def site(tmp_path: Path, series: Series) -> Path:
    """An installed package in its original state."""
    return lay_installed(tmp_path / "site-packages", series.base)


@pytest.fixture(scope="session")
def build() -> Path:
    """The build folder of this repository: it keeps the environment `apply` between test runs."""
    bootstrap.ensure("apply")
    return paths.build_dir()
