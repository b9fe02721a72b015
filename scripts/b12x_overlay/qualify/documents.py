# SPDX-License-Identifier: Apache-2.0
"""What an image's manifest and a doctor report say about a server.

``manifest.json`` lies at /opt/b12x-overlay/ in the image (schema ``b12x-overlay-image/1``); ``doctor --json`` is run
with the server's Python and environment variables (``b12x-overlay-doctor/1``). Only the fields named here are taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from b12x_overlay.qualify.errors import UsageError
from b12x_overlay.qualify.redact import image_name, redact
from b12x_overlay.qualify.schema import Identity
from b12x_overlay.qualify.variables import chosen

Document = Mapping[str, Any]


def read_document(path: Path) -> Document:
    """Read one file given with --identity.

    Raises:
        UsageError: unreadable, not JSON, or of a schema that is not known here.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not JSON: {error}",
            "give /opt/b12x-overlay/manifest.json of the image or 'doctor --json' output",
        ) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema not in _READERS:
        raise UsageError(f"{path} has schema {schema!r}, wanted is {' or '.join(_READERS)}")
    return dict(document)


def take(identity: Identity, document: Document) -> None:
    """Add what *document* says to *identity*."""
    _READERS[document["schema"]](identity, document)


def _image(identity: Identity, document: Document) -> None:
    inputs, found = _map(document, "inputs"), _map(document, "found")
    base, patchset = _map(inputs, "base"), _map(inputs, "patchset")
    _text(identity, "content_id", document.get("content_id"))
    _text(identity, "architecture", inputs.get("architecture"))
    if isinstance(base.get("name"), str):
        identity.manifest["base"] = image_name(base["name"])
    _text(identity, "base_digest", base.get("digest"))
    _text(identity, "patchset", patchset.get("patchset"))
    _list(identity, "patches", _names(patchset.get("patches"), "name"))
    _list(identity, "fragments", _names(inputs.get("fragments"), "id"))
    _text(identity, "b12x", _map(found, "b12x").get("label"))
    _versions(identity, _map(found, "packages"))
    _versions(
        identity, {"vllm": _map(found, "vllm").get("version"), "cuda": found.get("torch_cuda")}
    )


def _doctor(identity: Identity, document: Document) -> None:
    gpu, b12x = _map(document, "gpu"), _map(document, "b12x")
    vllm = _map(document, "vllm")
    _text(identity, "architecture", document.get("machine"))
    _text(identity, "vllm_state", vllm.get("state"))
    _text(identity, "patchset", vllm.get("patchset"))
    provider = [str(b12x[key]) for key in ("provider", "version") if b12x.get(key)]
    _text(identity, "b12x", " ".join(provider))
    active = [
        f for f in document.get("features") or [] if isinstance(f, Mapping) and f.get("active")
    ]
    _list(identity, "active", _names(active, "name"))
    _versions(identity, _map(document, "versions"))
    _versions(identity, {"driver": gpu.get("driver"), "cuda": gpu.get("cuda")})
    identity.gpus = _names(gpu.get("devices"), "name") or identity.gpus
    # What the running server says of its own variables counts for more than a report made beside it.
    answered = "/server_info" in identity.sources
    identity.environment |= {
        name: value
        for name, value in chosen(_map(document, "settings")).items()
        if not (answered and name.startswith("VLLM_"))
    }


_READERS: dict[str, Callable[[Identity, Document], None]] = {
    "b12x-overlay-image/1": _image,
    "b12x-overlay-doctor/1": _doctor,
}


def _map(document: Document, key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(identity: Identity, key: str, value: Any) -> None:
    if isinstance(value, str) and value:
        identity.manifest[key] = redact(value)


def _list(identity: Identity, key: str, names: list[str]) -> None:
    if names:
        identity.manifest[key] = names


def _names(value: Any, key: str) -> list[str]:
    """The texts under *key* of a list of objects; a GPU's UUID, which names one machine, is cut off."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    texts = [item.get(key) for item in value if isinstance(item, Mapping)]
    return [redact(re.sub(r"\s*\(UUID.*?\)", "", text)) for text in texts if isinstance(text, str)]


def _versions(identity: Identity, versions: Document) -> None:
    for name, version in versions.items():
        if isinstance(version, str) and version:
            identity.versions[redact(name)] = redact(version)
