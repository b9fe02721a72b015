# SPDX-License-Identifier: Apache-2.0
"""Marks every test by the folder it is in, so that ``pytest -m rows`` runs that part's proofs."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PARTS = ("apply", "rows", "csf", "image", "sync", "qualify")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        part = item.path.relative_to(TESTS).parts[0]
        if part in PARTS:
            item.add_marker(part)
