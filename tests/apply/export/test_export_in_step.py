# SPDX-License-Identifier: Apache-2.0
"""export: overlay files come back, and nothing that changed here since the checkout was in step is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from apply.checkouts import amend, files, git
from apply.factory import Project, place


def test_overlay_files_edited_in_the_checkout_come_back(made: Project, exported: Path) -> None:
    amend(exported, "vllm/new/logic.py", b"42", b"43")
    assert made.json("export", "--target", exported)["changed"] == ["overlay/vllm/new/logic.py"]
    assert files(made)["vllm/new/logic.py"] == b"ANSWER = 43\n"


def test_overlay_files_edited_here_are_not_lost(made: Project, exported: Path) -> None:
    place(made.root, "overlay/vllm/new/logic.py", b"ANSWER = 44\n")
    assert made.json("export", "--target", exported)["outcome"] == "unchanged"
    amend(exported, "vllm/new/logic.py", b"42", b"43")
    result = made.run("export", "--target", exported)
    assert result.code == 3
    assert "vllm/new/logic.py" in result.err
    assert files(made)["vllm/new/logic.py"] == b"ANSWER = 44\n"


def test_a_second_overlay_edit_comes_back_too(made: Project, exported: Path) -> None:
    for old, new in ((b"42", b"43"), (b"43", b"44"), (b"44", b"42")):
        amend(exported, "vllm/new/logic.py", old, new)
        document = made.json("export", "--target", exported)
        assert document["changed"] == ["overlay/vllm/new/logic.py"]
        assert files(made)["vllm/new/logic.py"] == b"ANSWER = %s\n" % new


def test_an_export_that_was_discarded_here_is_written_again(made: Project, exported: Path) -> None:
    first = files(made)
    amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
    amend(exported, "vllm/new/logic.py", b"42", b"43")
    assert made.run("export", "--target", exported).code == 0
    wanted = files(made)
    for name in ("patches/second.patch", "patches/patchset.toml"):
        place(made.root, name, first[name.removeprefix("patches/")])
    place(made.root, "overlay/vllm/new/logic.py", first["vllm/new/logic.py"])
    assert made.json("export", "--target", exported)["changed"] == [
        "patches/second.patch", "overlay/vllm/new/logic.py", "patches/patchset.toml",
    ]  # fmt: skip
    assert files(made) == wanted


@pytest.mark.parametrize("edited", [False, True], ids=["as applied", "edited too"])
def test_an_older_checkout_takes_back_no_newer_patch(
    made: Project, exported: Path, edited: bool
) -> None:
    git(exported, "reset", "--quiet", "--hard", "HEAD~2")
    assert made.run("--target", exported, "--commit").code == 0
    other = exported.with_name("other")
    git(exported.parent, "clone", "--quiet", str(exported), str(other))
    amend(other, "vllm/sub/b.py", b"return 7", b"return 9")
    assert made.run("export", "--target", other).code == 0
    newer = files(made)
    if edited:
        amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
    result = made.run("export", "--target", exported)
    assert result.code == 3, result.text
    assert "patches/second.patch changed here since" in result.err
    assert "rm patches/second.patch, then export again" in result.err
    assert files(made) == newer
    (made.root / "patches/second.patch").unlink()  # what the message says
    assert made.run("export", "--target", exported).code == 0
    assert b"return 8" in files(made)["second.patch"] or not edited


def test_a_damaged_record_counts_as_none(made: Project, exported: Path) -> None:
    record = exported / ".git/b12x-overlay-export.json"
    for text in ("{", "[]", '{"marker": 1}'):
        record.write_text(text)
        assert made.run("export", "--target", exported).code == 0
    assert json.loads(record.read_text())["files"].keys() >= {"patches/second.patch"}
