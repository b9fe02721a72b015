# SPDX-License-Identifier: Apache-2.0
"""The manifest in the image: /opt/b12x-overlay/manifest.json, beside ``verify`` and ``doctor``.

Standard library only and part of the programs, so it does not import the patch engine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SCHEMA = "b12x-overlay-image/1"
NAME = "manifest.json"
FOLDER = "/opt/b12x-overlay"
"""Where manifest, programs and kernel caches are in the image."""


class ManifestError(ValueError):
    """The manifest cannot be read or contradicts itself."""


def compose(
    inputs: dict[str, Any], content_id: str, found: dict[str, Any], files: list[dict[str, Any]]
) -> bytes:
    """The bytes of the manifest.

    Args:
        inputs: of :mod:`b12x_overlay.image.content`.
        content_id: the id over them.
        found: what the base holds (Python, package versions, b12x provider, RECORD digest).
        files: every file that the image adds to its base or changes in it: {"path", "sha256"}.
    """
    document = {
        "schema": SCHEMA,
        "content_id": content_id,
        "inputs": inputs,
        "found": found,
        "files": files,
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def read(path: Path) -> dict[str, Any]:
    """Read a manifest and check that its id is the one of its inputs.

    Raises:
        ManifestError: unreadable, of another schema, or edited.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ManifestError(f"{path}: not a manifest of schema {SCHEMA}")
    canonical = json.dumps(document.get("inputs"), sort_keys=True, separators=(",", ":"))
    actual = hashlib.sha256(canonical.encode()).hexdigest()
    if actual != document.get("content_id"):
        raise ManifestError(
            f"{path}: edited: its inputs give content id {actual[:16]}, it says {document.get('content_id')}"
        )
    return document
