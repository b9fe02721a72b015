# SPDX-License-Identifier: Apache-2.0
"""Rewriting the pin file: rows change, the rest stays as its author wrote it."""

from __future__ import annotations

import tomllib

import pytest
from apply.factory import pin_text
from b12x_overlay.console import CommandError
from b12x_overlay.patching.patchset import TouchedFile
from b12x_overlay.patching.pinfile import with_files

TEXT = f"""# head
{pin_text()}
[[patch]]
name = "a"  # of three
overlay = [
  "x",
]

[[patch]]
name = "b"
overlay = []

[[patch.file]]
path = "one"
before = "1"  # kept
after = "2"

[[patch]]
name = "c"
overlay = []
"""
FILES = [TouchedFile("one", "1", "3"), TouchedFile("two", "4", "5")]


def rows(text: bytes) -> dict[str, list[dict[str, str]]]:
    return {row["name"]: row.get("file", []) for row in tomllib.loads(text.decode())["patch"]}


def test_new_rows_are_written_in_the_files_form() -> None:
    series = [("a", FILES), ("b", FILES[:1]), ("c", FILES)]
    out = with_files(TEXT.encode(), series)
    assert rows(out) == {
        name: [{"path": f.path, "before": f.before, "after": f.after} for f in files]
        for name, files in series
    }
    text = out.decode()
    assert "\n\n\n" not in text
    assert text.count("\n\n[[patch]]") == text.count("[[patch]]")
    assert text.count("\n\n[[patch.file]]") == text.count("[[patch.file]]")
    for kept in ("# head", "# of three", "# kept", 'overlay = [\n  "x",\n]'):
        assert kept in text
    assert with_files(out, series) == out


def test_another_order_is_refused() -> None:
    with pytest.raises(CommandError, match="in the order b, a, c"):
        with_files(TEXT.encode(), [("b", []), ("a", []), ("c", [])])
