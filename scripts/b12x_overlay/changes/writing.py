# SPDX-License-Identifier: Apache-2.0
"""Writes a new fragment, whole and valid or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from b12x_overlay.changes.model import FIELDS, SCHEMA
from b12x_overlay.console import CommandError


def fragment_bytes(values: Mapping[str, Any]) -> bytes:
    """The file of a fragment: fields in the schema's order, empty lists left out, two spaces, UTF-8, LF."""
    value = {"schema": SCHEMA, **{key: values[key] for key in FIELDS if values.get(key)}}
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def write_new(path: Path, data: bytes) -> None:
    """Create *path* with *data*, complete from its first moment on and never over another file.

    Raises:
        CommandError: *path* exists.
    """
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        os.link(temporary, path)
    except FileExistsError as error:
        raise CommandError(
            f"{path} exists; nothing was written",
            reason="fragment-exists",
            hint="choose another --id",
        ) from error
    finally:
        Path(temporary).unlink()
