# SPDX-License-Identifier: Apache-2.0
"""What goes into an image, and the id that names exactly that.

Computed before a build (for the tag and the cache folders) and again inside it, from the same files: the build
refuses an id that is not its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from b12x_overlay.image import programs
from b12x_overlay.image.expected import from_checkout
from b12x_overlay.patching import manifest as patch_manifest
from b12x_overlay.patching.patchset import load, sha256
from b12x_overlay.paths import CHANGES, OVERLAY, PATCHES, REPO

DOCKERFILE = REPO / "docker" / "Dockerfile"

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Machine name (uname -m, wheel tags) -> the name that image indexes use."""

STATUS = {
    "x86_64": "built and verified without a GPU; whether it serves a model on SM120 is not verified",
    "aarch64": "built from the same file as x86_64; never run",
}
"""What has been shown of the images of each architecture, as they say themselves."""


class ContentError(ValueError):
    """The inputs are not in order; the message says which."""


@dataclass(frozen=True)
class Base:
    """The base image, as far as it is known.

    Attributes:
        name: as a person would write it, "vllm/vllm-openai:v0.33.0".
        digest: of the platform's manifest ("sha256:..."), "" if unknown.
        index_digest: of the multi-platform index that the name points to, "" if there is none or it is unknown.
    """

    name: str
    digest: str = ""
    index_digest: str = ""


def inputs(base: Base, architecture: str) -> dict[str, Any]:
    """Everything that decides the image's content, as plain data.

    Raises:
        ContentError: an unknown architecture, or a fragment that the patch set names and changes/ lacks.
        PatchSetError: patches/ and overlay/ are not in order.
    """
    if architecture not in ARCHITECTURES:
        known = " or ".join(ARCHITECTURES)
        raise ContentError(
            f"architecture {architecture!r} is not {known}: vLLM 0.33.0 has wheels for those two"
        )
    patch_set = load(PATCHES, OVERLAY)
    expected = from_checkout()
    return {
        "architecture": architecture,
        "base": {"name": base.name, "digest": base.digest, "index_digest": base.index_digest},
        "patchset": patch_manifest.build(patch_set),
        "fragments": [_fragment(name) for patch in patch_set.patches for name in patch.fragments],
        "programs": {name: sha256(programs.build(name, expected)) for name in programs.PROGRAMS},
        "dockerfile": sha256(DOCKERFILE.read_bytes()),
        "status": STATUS[architecture],
    }


def content_id(of: dict[str, Any]) -> str:
    """The id of *inputs*: SHA-256 (64 hex digits) over their canonical JSON."""
    return hashlib.sha256(
        json.dumps(of, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _fragment(name: str) -> dict[str, str]:
    path = CHANGES / f"{name}.json"
    try:
        return {"id": name, "sha256": sha256(path.read_bytes())}
    except OSError as error:
        raise ContentError(
            f"{path} is missing, patches/patchset.toml names it: run scripts/changes"
        ) from error
