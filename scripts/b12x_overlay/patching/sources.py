# SPDX-License-Identifier: Apache-2.0
"""Where pinned downloads and the default tree lie; kept apart from fetching, which loads much more."""

from __future__ import annotations

from pathlib import Path

from b12x_overlay.patching.patchset import Pin
from b12x_overlay.paths import build_dir


def sources() -> Path:
    """The folder of pinned downloads."""
    return build_dir() / "sources"


def default_tree(pin: Pin) -> Path:
    """Where the pinned source distribution is unpacked."""
    return sources() / pin.sdist.filename.removesuffix(".tar.gz")
