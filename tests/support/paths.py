# SPDX-License-Identifier: Apache-2.0
"""Where the test environment is; scripts/test makes it."""

from __future__ import annotations

import os
from pathlib import Path

from b12x_overlay.paths import OVERLAY, PATCHES, REPO, build_dir

TESTS = REPO / "tests"
SCRIPTS = REPO / "scripts"
SOURCES = build_dir() / "sources"
TEST_ENV = build_dir() / "test-env"
TREES = ("stock", "patched")
PROVIDERS = ("b12x-flashinfer", "b12x-pypi")


def site(name: str) -> Path:
    """Folder to put on PYTHONPATH: ``stock``, ``patched``, ``b12x-flashinfer`` or ``b12x-pypi``.

    Raises:
        FileNotFoundError: the test environment has not been made.
    """
    path = TEST_ENV / name
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is missing; run scripts/test --setup-only")
    return path


def pythonpath(tree: str = "patched", provider: str | None = "b12x-flashinfer") -> str:
    """PYTHONPATH for a child process: a vLLM tree, a b12x (or None), and the tests' and commands' own modules."""
    names = [tree] if provider is None else [tree, provider]
    return os.pathsep.join([*(str(site(name)) for name in names), str(SCRIPTS), str(TESTS)])


__all__ = [
    "OVERLAY",
    "PATCHES",
    "PROVIDERS",
    "REPO",
    "SCRIPTS",
    "SOURCES",
    "TESTS",
    "TEST_ENV",
    "TREES",
    "pythonpath",
    "site",
]
