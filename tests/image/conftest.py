# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the image part."""

from __future__ import annotations

from pathlib import Path

import pytest

from image.providers import make_states


@pytest.fixture(scope="session")
def provider_states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Site folders with the real wheels of both b12x providers, as pip leaves them (see :mod:`image.providers`)."""
    return make_states(tmp_path_factory.mktemp("providers"))
