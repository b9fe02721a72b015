# SPDX-License-Identifier: Apache-2.0
"""export: what a set cannot hold, or what is not in order, is refused and named; no patch is lost (trap 24)."""

from __future__ import annotations

from pathlib import Path

from apply.checkouts import amend, files, git
from apply.factory import Project, place


def test_trap_24_an_empty_series_deletes_nothing(made: Project, exported: Path) -> None:
    before = files(made)
    git(exported, "reset", "--quiet", "--hard", "HEAD~2")
    result = made.run("export", "--target", exported)
    assert result.code == 3
    assert "nothing to export" in result.err
    assert files(made) == before


def test_trap_24_a_missing_commit_deletes_nothing(made: Project, exported: Path) -> None:
    before = files(made)
    git(exported, "reset", "--quiet", "--hard", "HEAD~1")
    result = made.run("export", "--target", exported)
    assert result.code == 3
    assert "second" in result.err
    assert files(made) == before


def test_what_a_set_cannot_hold_is_refused_and_named(made: Project, exported: Path) -> None:
    before = files(made)
    tip = git(exported, "rev-parse", "HEAD")

    def refused(*words: str) -> None:
        result = made.run("export", "--target", exported)
        assert result.code == 3, result.text
        assert all(word in result.err for word in words), result.err
        assert files(made) == before
        git(exported, "reset", "--quiet", "--hard", tip)
        git(exported, "clean", "--quiet", "-d", "--force")

    def amended(*message: str) -> None:
        git(exported, "add", "--all")
        git(exported, "commit", "--quiet", "--amend", *(message or ("--no-edit",)))

    place(exported, "vllm/new/more.py", b"x = 1\n")  # imported somewhere, and not added
    refused("not committed", "vllm/new/more.py")
    (exported / "vllm/sub/b.py").chmod(0o755)
    amended()
    refused("changes the mode of vllm/sub/b.py from 100644 to 100755")
    (exported / "vllm/new/logic.py").unlink()
    (exported / "vllm/new/logic.py").symlink_to("other.py")
    amended()
    refused("vllm/new/logic.py", "no plain file")
    git(exported, "rm", "--quiet", "vllm/new/logic.py")
    amended()
    refused("vllm/new/logic.py was deleted", "remove overlay/vllm/new/logic.py")
    for line in ("---", "diff --git a/x b/x"):
        amended("--message", f"Second\n\nas\n{line}\nsays\n\nPatch: second")
        refused("message of second", "'---' or 'diff --git'")
    git(exported, "reset", "--quiet", "--hard", "HEAD~1")
    git(exported, "commit", "--quiet", "--amend", "--message", "First without its line")
    git(exported, "cherry-pick", "--quiet", tip)
    refused("first is in patches/patchset.toml", "ends at", "First without its line; no line")


def test_an_overlay_file_that_no_patch_lists_stops_export(made: Project, exported: Path) -> None:
    place(made.root, "overlay/vllm/other/more.py", b"x = 1\n")
    before = files(made)
    result = made.run("export", "--target", exported)
    assert (result.code, files(made)) == (3, before)
    assert "overlay/vllm/other/more.py belongs to no patch" in result.err


def test_a_set_that_would_not_load_is_not_written(made: Project, exported: Path) -> None:
    amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
    (made.root / "overlay/vllm/new/logic.py").unlink()
    before = files(made)
    for flags in ((), ("--dry-run",)):
        result = made.run("export", "--target", exported, *flags)
        assert (result.code, files(made)) == (3, before), result.text
        assert "the set would not be in order: " in result.err
        assert "nothing was written" in result.err
        assert "/tmp/tmp" not in result.err
        assert "next: git -C" in result.err


def test_refusals(made: Project, exported: Path) -> None:
    before = files(made)

    def refused(words: str) -> None:
        result = made.run("export", "--target", exported)
        assert result.code == 3, result.text
        assert words in result.err
        assert files(made) == before
        git(exported, "reset", "--quiet", "--hard", tip)

    tip = git(exported, "rev-parse", "HEAD")
    place(exported, "vllm/a.py", b"dirty\n")
    refused("not committed")
    place(exported, "vllm/added.py", b"x\n")
    git(exported, "add", "--all")
    git(exported, "commit", "--quiet", "--amend", "--no-edit")
    refused("adds vllm/added.py")
    git(exported, "rm", "--quiet", "vllm/sub/b.py")
    git(exported, "commit", "--quiet", "--amend", "--no-edit")
    refused("deletes vllm/sub/b.py")
    git(exported, "commit", "--quiet", "--allow-empty", "--message", "More\n\nPatch: second")
    refused("2 commits for second")
    git(exported, "commit", "--quiet", "--allow-empty", "--message", "Odd\n\nPatch: odd")
    refused("no [[patch]]")
    git(exported, "commit", "--quiet", "--allow-empty", "--message", "No name")
    refused("nothing to export")
