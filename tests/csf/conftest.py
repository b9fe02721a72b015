# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the CSF tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import b12x_overlay.csf.core  # noqa: F401 - makes the package importable as nvfp4_csf
import pytest
from b12x_overlay.paths import build_dir
from csf import checkpoints
from csf.convert_support import BOOKKEEPING, run


@pytest.fixture(scope="session")
def bundled_csf() -> ModuleType:
    """The CSF module of the b12x bundled in flashinfer-python, its device check aside (it wants CUDA tensors)."""
    site = build_dir() / "test-env" / "b12x-flashinfer"
    if not site.is_dir():
        pytest.skip(f"{site} is missing; scripts/test --setup-only makes it")
    sys.path.append(str(site))
    from b12x._lib.quant import nvfp4_csf

    nvfp4_csf.Nvfp4CsfBatch.validate = lambda self: None
    return nvfp4_csf


@pytest.fixture(scope="session")
def vllm() -> ModuleType:
    """The patched vLLM on a pretended SM120 device."""
    pytest.importorskip("vllm", reason="scripts/test puts the patched vLLM on the path")
    from support import sm120

    sm120.install()
    sm120.allow_b12x()
    import vllm

    return vllm


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoints.small(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    assert run(source, tmp_path / "csf") == 0
    return tmp_path / "csf"


@pytest.fixture
def named_like_bookkeeping(source: Path) -> Path:
    """A source whose own files have the names that the commands use beside their results."""
    for name in BOOKKEEPING:
        (source / name).write_text(f'{{"user": "{name}"}}')
    return source
