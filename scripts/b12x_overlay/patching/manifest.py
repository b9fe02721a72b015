# SPDX-License-Identifier: Apache-2.0
"""The set's digest, its manifest, and the module ``vllm/b12x_patchset.py`` that carries both into a vLLM.

At run time vLLM code asks ``from vllm.b12x_patchset import PATCHSET_ID`` (a string of 16 hex digits that differs as
soon as a patch, an overlay file or the pin differs) and may read ``MANIFEST``. Images and tools call ``build``.

The module is information for people and for run time. The command itself decides by the files' bytes; it reads
the module for one thing only, to take an *older* set off a tree (``MANIFEST["series"]`` holds that set's patches),
and then checks every byte it derives against the recorded sha256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from functools import cache
from typing import Any

from b12x_overlay.patching.patchset import PatchSet

SCHEMA = "b12x-overlay-patchset/1"
FIRST_LINES = (
    b"# SPDX-License-Identifier: Apache-2.0\n"
    b"# Written by scripts/apply-patches of the b12x overlay; do not edit.\n"
)
"""How every marker module starts."""

_ASSIGNMENT = "\nMANIFEST = "


@cache
def build(patch_set: PatchSet) -> dict[str, Any]:
    """The manifest: pin, patches with hashes, overlay files with hashes, and the digest over them.

    Only strings, integers, lists and dicts, the same for every machine and run. Do not change the result: it is
    made once per set.
    """
    pin = patch_set.pin
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "revision": patch_set.revision,
        "pin": {
            "version": pin.version,
            "commit": pin.commit,
            "sdist": {"filename": pin.sdist.filename, "sha256": pin.sdist.sha256},
            "wheels": [{"filename": wheel.filename, "sha256": wheel.sha256} for wheel in pin.wheels],
        },
        "patches": [
            {
                "name": patch.name,
                "sha256": patch.sha256,
                "files": [
                    {"path": file.path, "before": file.before, "after": file.after} for file in patch.files
                ],
                "overlay": [
                    {"path": file.path, "sha256": file.sha256, "executable": int(file.executable)}
                    for file in patch.overlay
                ],
            }
            for patch in patch_set.patches
        ],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    return {"patchset": digest.hexdigest()[:16], **body}


def patchset_id(patch_set: PatchSet) -> str:
    """The digest over pin, patches and overlay files: 16 hex digits."""
    return str(build(patch_set)["patchset"])


@cache
def render(patch_set: PatchSet) -> bytes:
    """The bytes of ``vllm/b12x_patchset.py`` for this set."""
    manifest = dict(build(patch_set))
    manifest["series"] = {
        patch.name: base64.b64encode(zlib.compress(patch.data, 9)).decode()
        for patch in patch_set.patches
    }
    text = (
        '"""Which b12x patch set this vLLM carries: the same id means the same patches and overlay files.\n\n'
        "``MANIFEST`` lists them with their sha256; its ``series`` holds the patches (zlib, base64), so that a later\n"
        'set can take this one off again.\n"""\n\n'
        f'PATCHSET_ID = "{manifest["patchset"]}"\n'
        f"{_ASSIGNMENT}{json.dumps(manifest, indent=1)}\n"
    )
    return FIRST_LINES + text.encode()


def read(data: bytes) -> dict[str, Any] | None:
    """The manifest inside a module that ``render`` wrote, of this or another set; None if it holds none."""
    try:
        manifest = json.loads(data.decode().partition(_ASSIGNMENT)[2])
    except ValueError:
        return None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        return None
    return manifest


def series(manifest: dict[str, Any]) -> dict[str, bytes]:
    """The patch files recorded in a manifest that ``read`` returned.

    Raises:
        ValueError: the record is damaged.
    """
    try:
        return {
            name: zlib.decompress(base64.b64decode(text))
            for name, text in manifest["series"].items()
        }
    except (KeyError, AttributeError, TypeError, zlib.error) as error:
        raise ValueError(f"the recorded patches cannot be read: {error!r}") from error
