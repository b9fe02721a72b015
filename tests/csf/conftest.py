# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the CSF tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


@pytest.fixture
def csf(vllm, monkeypatch):
    """Helpers, the reference b12x, W4A16 forced, compression on, and an inventory that names every layer."""
    monkeypatch.setenv("VLLM_B12X_MOE_FP4_FORCE_A16", "1")
    monkeypatch.setenv("VLLM_B12X_CSF_COMPRESS", "1")
    import vllm.utils.b12x as accessors
    from csf import layers
    from rows import harness
    from support import reference_b12x
    from vllm.model_executor.layers.fused_moe.b12x_a4 import plans, provider
    from vllm.model_executor.layers.fused_moe.b12x_a4 import settings as a4_settings
    from vllm.model_executor.layers.quantization.nvfp4_csf import inventory, owner, settings
    from vllm.v1.worker.moe_row_types import RowTyper

    monkeypatch.setattr(RowTyper, "armed", False)
    everything = SimpleNamespace(layers=frozenset((False, n) for n in range(8)))
    monkeypatch.setattr(inventory, "take_inventory", lambda checkpoint: everything)
    real = accessors._B12X_SUBMODULES["b12x.moe.fused_moe"]
    tools = SimpleNamespace(
        layers=layers,
        harness=harness,
        owner=owner,
        b12x=reference_b12x.install(),
        inventory=everything,
    )

    def arm(on: bool) -> None:
        monkeypatch.setenv("B12X_W4A16_A4_PREFILL_MIN_TOKENS", "1" if on else "0")
        a4_settings.get_settings.cache_clear()

    tools.arm = arm
    arm(False)
    settings.get_settings.cache_clear()
    with owner.owner_scope() as tools.scope:
        yield tools
    accessors._B12X_SUBMODULES["b12x.moe.fused_moe"] = real
    provider.get_provider.cache_clear()
    plans._shared.clear()
    monkeypatch.undo()
    settings.get_settings.cache_clear()
    a4_settings.get_settings.cache_clear()
