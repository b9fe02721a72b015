# SPDX-License-Identifier: Apache-2.0
"""Marks every test by the folder it is in, so that ``pytest -m rows`` runs that part's proofs.

Also lets this process import the patched vLLM and the bundled b12x that scripts/test made, unless another vLLM is
importable. Not by PYTHONPATH: child processes, such as a pip in an environment of its own, must not see them.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
from support.paths import TEST_ENV

if importlib.util.find_spec("vllm") is None:
    sys.path[:0] = [str(TEST_ENV / name) for name in ("patched", "b12x-flashinfer")]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell. Children would inherit that and not notice the Ctrl-C that tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
PARTS = ("apply", "rows", "csf", "image", "sync", "qualify")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        part = item.path.relative_to(TESTS).parts[0]
        if part in PARTS:
            item.add_marker(part)
