# SPDX-License-Identifier: Apache-2.0
"""Fragments for tests: a valid one, and folders of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from b12x_overlay.changes.model import SCHEMA, Entry


def fragment(name: str = "vllm-one", **fields: Any) -> dict[str, Any]:
    """A valid fragment; a field given as None is left out."""
    value = {
        "schema": SCHEMA,
        "id": name,
        "category": "fix",
        "summary": "One thing works.",
        "models": ["all"],
        "compatibility": "No user action required.",
        "authors": ["octocat"],
        **fields,
    }
    return {key: item for key, item in value.items() if item is not None}


def encode(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def entry(name: str = "vllm-one", **fields: Any) -> Entry:
    return Entry(f"{name}.json", encode(fragment(name, **fields)))


def write(folder: Path, name: str = "vllm-one", **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(encode(fragment(name, **fields)))
    return path
