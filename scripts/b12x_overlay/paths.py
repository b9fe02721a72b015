# SPDX-License-Identifier: Apache-2.0
"""Where things are: the repository's folders, and the one folder that commands write to."""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PATCHES = REPO / "patches"
OVERLAY = REPO / "overlay"
CHANGES = REPO / "changes"
REQUIREMENTS = REPO / "scripts" / "requirements"


def build_dir() -> Path:
    """The folder for downloads, virtual environments and results: build/, or $B12X_OVERLAY_BUILD."""
    chosen = os.environ.get("B12X_OVERLAY_BUILD")
    return Path(chosen).expanduser().absolute() if chosen else REPO / "build"
