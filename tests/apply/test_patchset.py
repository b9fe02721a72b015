# SPDX-License-Identifier: Apache-2.0
"""The pin file's rules, and that this repository's own set keeps them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from apply.factory import REPO, Project, Series, place
from b12x_overlay.patching import patchset
from b12x_overlay.patching.listing import changed_lines
from b12x_overlay.patching.patchset import PatchSetError

Break = Callable[[Path], None]


def edit(name: str, old: str, new: str) -> Break:
    def change(root: Path) -> None:
        path = root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


PIN = "patches/patchset.toml"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: (root / PIN).unlink(), "is missing"),
        (lambda root: (root / PIN).write_text("x ="), PIN),
        (edit(PIN, "schema = 1", "schema = 2"), "schema = 1"),
        (edit(PIN, 'version = "0.33.0"', ""), "version"),
        (edit(PIN, 'name = "first"', 'name = "First"'), "small letters"),
        (edit(PIN, 'name = "second"', 'name = "first"'), "first"),
        (edit(PIN, 'why = "y"', 'why = ""'), "why"),
        (edit(PIN, 'before = "', 'before = "xyz'), "sha256"),
        (edit(PIN, 'path = "vllm/sub/b.py"', 'path = "vllm/sub/c.py"'), "vllm/sub/c.py"),
        (
            edit(PIN, '"vllm/new/logic.py"', '"vllm/new/logics.py"'),
            "vllm/new/logics.py does not exist",
        ),
        (lambda root: (root / "patches/first.patch").unlink(), "first.patch is missing"),
        (lambda root: (root / "patches/third.patch").write_text("x"), "third.patch is not listed"),
        (lambda root: (root / "overlay/vllm/link.py").symlink_to("new/logic.py"), "symbolic link"),
        (lambda root: place(root, "overlay/other/x.py", b""), "land in vllm/"),
        (lambda root: place(root, f"overlay/{patchset.MARKER}", b""), "written by the command"),
        (
            edit("patches/first.patch", "--- a/vllm/a.py", "--- a/setup.py"),
            "renames are not supported",
        ),
    ],
)
def test_a_broken_rule_is_named(made: Project, tree: Path, change: Break, words: str) -> None:
    change(made.root)
    with pytest.raises(PatchSetError) as error:
        patchset.load(made.root / "patches", made.root / "overlay")
    assert words in str(error.value)
    result = made.run("status", "--target", tree)
    assert result.code == 4
    assert words in result.err


def test_a_broken_chain_is_named(made: Project) -> None:
    text = (made.root / PIN).read_text()
    loaded = patchset.load(made.root / "patches", made.root / "overlay")
    (made.root / PIN).write_text(text.replace(loaded.chains["vllm/a.py"][0].after, "0" * 64, 1))
    with pytest.raises(PatchSetError, match="second starts from"):
        patchset.load(made.root / "patches", made.root / "overlay")


def test_overlay_files_that_no_patch_brings_are_named_and_left_out(
    made: Project, tree: Path
) -> None:
    place(made.root, "overlay/vllm/stray.py", b"")
    place(made.root, "overlay/vllm/new/__pycache__/logic.cpython-311.pyc", b"x")
    assert made.json("list")["unclaimed"] == ["vllm/stray.py"]
    made.run("--target", tree)
    assert not (tree / "vllm/stray.py").exists()
    assert not (tree / "vllm/new/__pycache__").exists()


def test_a_folder_in_overlay_stands_for_its_files(made: Project, series: Series) -> None:
    edit(PIN, '["vllm/new/__init__.py", "vllm/new/logic.py"]', '["vllm/new"]')(made.root)
    loaded = patchset.load(made.root / "patches", made.root / "overlay")
    assert [file.path for file in loaded.overlay] == ["vllm/new/__init__.py", "vllm/new/logic.py"]


def test_list_counts_changed_lines_as_git_does(made: Project) -> None:
    document = made.json("list")
    for row in document["patches"]:
        command = ["git", "apply", "--numstat", made.root / f"patches/{row['name']}.patch"]
        out = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=made.root
        ).stdout
        counts = [line.split("\t")[:2] for line in out.splitlines()]
        assert [row["added"], row["removed"]] == [
            sum(int(count[i]) for count in counts) for i in (0, 1)
        ]
    assert document["added"] == sum(row["added"] for row in document["patches"])
    assert "upstream lines" in made.run("list").out


class TestThisRepository:
    """The real patches/ and overlay/."""

    def test_it_keeps_the_rules(self) -> None:
        loaded = patchset.load(REPO / "patches", REPO / "overlay")
        assert loaded.patches
        assert loaded.unclaimed == ()

    def test_it_stays_small(self) -> None:
        counts = changed_lines(patchset.load(REPO / "patches", REPO / "overlay"))
        assert sum(added + removed for added, removed in counts.values()) < 200

    def test_packages_that_it_adds_have_an_init(self) -> None:
        loaded = patchset.load(REPO / "patches", REPO / "overlay")
        paths = {file.path for file in loaded.overlay}
        from support import paths as places

        for path in paths:
            folder = path.rpartition("/")[0]
            init = f"{folder}/__init__.py"
            stock = places.TEST_ENV / "stock"
            if stock.is_dir():
                assert init in paths or (stock / init).exists(), path

    def test_each_patch_says_which_fragments_tell_of_it(self) -> None:
        for patch in patchset.load(REPO / "patches", REPO / "overlay").patches:
            for fragment in patch.fragments:
                assert list((REPO / "changes").glob(f"{fragment}*")), (patch.name, fragment)
