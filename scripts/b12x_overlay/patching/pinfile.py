# SPDX-License-Identifier: Apache-2.0
"""Rewrites the hashes in patchset.toml and keeps its form and comments (tomlkit, environment ``apply``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.patching.patchset import TouchedFile


def with_files(text: bytes, series: Sequence[tuple[str, Sequence[TouchedFile]]]) -> bytes:
    """The pin file with each patch's ``[[patch.file]]`` rows replaced; rows that fit already stay as written.

    Raises:
        CommandError: the patches are listed in another order than *series*.
    """
    import tomlkit

    document = tomlkit.parse(text.decode())
    rows: Any = document.get("patch", [])
    listed, wanted = [str(row["name"]) for row in rows], [name for name, _ in series]
    if listed != wanted:
        raise CommandError(
            f"patchset.toml lists {', '.join(listed)}; the commits are in the order {', '.join(wanted)}",
            reason="wrong-order",
            hint="bring the [[patch]] entries into the commits' order",
        )
    for row, (_, files) in zip(rows, series, strict=True):
        if [str(entry["path"]) for entry in row.get("file", [])] == [file.path for file in files]:
            for entry, file in zip(row.get("file", []), files, strict=True):
                for key, value in (("before", file.before), ("after", file.after)):
                    if entry[key] != value:
                        entry[key] = value
        else:
            row["file"] = _rows(files, last=row is rows[-1])
    return tomlkit.dumps(document).encode()


def _rows(files: Sequence[TouchedFile], *, last: bool) -> Any:
    """New ``[[patch.file]]`` rows, with an empty line before the next patch if there is one."""
    import tomlkit

    made = tomlkit.aot()
    for file in files:
        entry = tomlkit.table()
        for key, value in (("path", file.path), ("before", file.before), ("after", file.after)):
            entry.add(key, value)
        if file is files[-1] and not last:
            entry.add(tomlkit.nl())
        made.append(entry)
    return made
