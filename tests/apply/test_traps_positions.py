# SPDX-License-Identifier: Apache-2.0
"""Public faults of patch tools, the kinds about where and whether a patch lands (trap numbers in the names).

1 silent skip in a nested repository, 2 applied twice, 3 the wrong function, 4 success although nothing changed,
6 a reinstall drops patches, 7 absorbed upstream, 8 a patch edited on a patched tree, 9 line endings.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from apply.conftest import A
from apply.factory import (
    REPO,
    Project,
    Series,
    contents,
    lay,
    lay_installed,
    place,
    project,
    snapshot,
)


def single(tmp_path: Path, old: bytes, new: bytes) -> tuple[Project, Path]:
    """A project with one patch over vllm/a.py, and the tree for it."""
    series = Series({"vllm/a.py": old}).add("one", {"vllm/a.py": new})
    return project(tmp_path / "project").write(series), lay(tmp_path / "tree", series.base)


# --- 1


@pytest.mark.parametrize("variables", [False, True])
def test_trap_01_inside_another_repository(
    made: Project, tmp_path: Path, series: Series, variables: bool
) -> None:
    outer = tmp_path / "outer"
    subprocess.run(["git", "init", "--quiet", outer], check=True)
    site = lay_installed(outer / "venv/lib/python3.11/site-packages", series.base)
    before = snapshot(site)
    env = {"GIT_DIR": str(outer / ".git"), "GIT_WORK_TREE": str(outer)} if variables else {}
    assert made.run("--target", site, env=env).code == 0
    assert contents(site)["vllm/a.py"] == series.final()["vllm/a.py"]
    assert made.run("status", "--target", site, env=env).code == 0
    assert made.run("revert", "--target", site, env=env).code == 0
    assert snapshot(site) == before


# --- 2


def test_trap_02_an_insertion_that_matches_again_is_inserted_once(tmp_path: Path) -> None:
    old = b"a\nb\nc\nx1\nx2\nx3\nz1\nz2\nz3\nend\n"
    new = old.replace(b"x3\n", b"x3\ny\nx1\nx2\nx3\n")
    made, tree = single(tmp_path, old, new)
    assert made.json("--target", tree)["outcome"] == "applied"
    assert made.json("--target", tree)["outcome"] == "already applied"
    assert (tree / "vllm/a.py").read_bytes() == new
    made.run("revert", "--target", tree)
    assert (tree / "vllm/a.py").read_bytes() == old


# --- 3

CLASSES = b"class A:\n    def f(self):\n        x = 1\n        y = 2\n        return x\n\n\n"
CLASSES += CLASSES.replace(b"class A", b"class B") + b"def after():\n    pass\n"


def test_trap_03_a_hunk_never_lands_in_the_wrong_class(tmp_path: Path) -> None:
    new = CLASSES[:70] + CLASSES[70:].replace(b"y = 2", b"y = 3")
    assert new.count(b"y = 3") == 1
    made, tree = single(tmp_path, CLASSES, new)
    upstream = CLASSES[:70] + CLASSES[70:].replace(b"x = 1", b"x = 5")
    (tree / "vllm/a.py").write_bytes(upstream)
    refused = made.run("--target", tree)
    assert refused.code == 3
    assert "vllm/a.py:" in refused.err
    assert (tree / "vllm/a.py").read_bytes() == upstream


def test_trap_03_drift_is_named_as_drift(tmp_path: Path) -> None:
    new = A.replace(b"line 20\n", b"line twenty\n")
    made, tree = single(tmp_path, A, new)
    (tree / "vllm/a.py").write_bytes(b"# new\n# lines\n" + A)
    document = made.json("--target", tree)
    file = document["patches"][0]["files"][0]
    assert (document["exit"], file["reason"]) == (3, "moved")
    assert "vllm/a.py:19" in file["detail"]
    assert "+2 lines" in file["detail"]
    assert (tree / "vllm/a.py").read_bytes() == b"# new\n# lines\n" + A


# --- 4


def test_trap_04_a_moved_anchor_fails_and_changes_nothing(
    made: Project, tree: Path, tmp_path: Path
) -> None:
    (tree / "vllm/sub/b.py").write_bytes(
        (tree / "vllm/sub/b.py").read_bytes().replace(b"def run", b"def ran")
    )
    before = snapshot(tree)
    document = made.json("--target", tree)
    assert document["exit"] == 3
    states = {patch["name"]: patch["state"] for patch in document["patches"]}
    assert states == {"first": "not-applied", "second": "modified"}
    assert "vllm/sub/b.py:4" in document["patches"][1]["files"][1]["detail"]
    assert snapshot(tree) == before


def test_trap_04_git_configuration_has_no_say(
    made: Project, tmp_path: Path, series: Series
) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n")
    results = []
    for name, env in (
        ("plain", {"GIT_CONFIG_GLOBAL": "/dev/null"}),
        ("odd", {"GIT_CONFIG_GLOBAL": str(config)}),
    ):
        tree = lay(tmp_path / name, series.base)
        subprocess.run(["git", "init", "--quiet", tree], check=True)
        place(tree, ".gitattributes", b"* text eol=lf\n")
        assert made.run("--target", tree, env=env).code == 0
        results.append(contents(tree / "vllm"))
    assert results[0] == results[1]


# --- 6


def test_trap_06_a_reinstall_is_seen_and_the_marker_not_believed(
    made: Project, site: Path, series: Series
) -> None:
    made.run("--target", site)
    for (
        path,
        data,
    ) in series.base.items():  # pip install --force-reinstall, with the marker left behind
        (site / path).write_bytes(data)
    document = made.json("status", "--target", site)
    assert document["exit"] == 1
    assert {patch["state"] for patch in document["patches"]} == {"not-applied", "leftover-overlay"}
    assert document["extra"][0]["state"] == "stale-marker"
    assert made.json("--target", site)["outcome"] == "applied"
    assert made.run("verify", "--target", site).code == 0


def test_trap_06_a_hand_edit_is_seen_and_kept(made: Project, site: Path) -> None:
    made.run("--target", site)
    edited = (site / "vllm/a.py").read_bytes() + b"# mine\n"
    (site / "vllm/a.py").write_bytes(edited)
    document = made.json("status", "--target", site)
    assert (document["exit"], document["state"]) == (1, "modified")
    for verb in ("apply", "revert"):
        assert made.run(verb, "--target", site).code == 3
        assert (site / "vllm/a.py").read_bytes() == edited


def test_trap_06_half_edited_and_missing_files_are_named(made: Project, tree: Path) -> None:
    half = A.replace(b"line 5\n", b"line five\n")
    (tree / "vllm/a.py").write_bytes(half)
    (tree / "vllm/sub/b.py").unlink()
    document = made.json("status", "--target", tree)
    first, second = document["patches"]
    assert first["files"][0]["reason"] == "half-edited"
    assert "1 of 2 hunks" in first["files"][0]["detail"]
    assert [file["state"] for file in second["files"]][1] == "missing"
    assert made.run("--target", tree).code == 3


# --- 7


def test_trap_07_absorbed_upstream_is_named_and_left_alone(tmp_path: Path) -> None:
    new = A.replace(b"line 20\n", b"line twenty\n")
    made, tree = single(tmp_path, A, new)
    absorbed = b"# shifted\n" + new
    (tree / "vllm/a.py").write_bytes(absorbed)
    document = made.json("--target", tree)
    assert (document["exit"], document["state"]) == (3, "absorbed-upstream")
    assert "If upstream fixes it" in document["next"]
    for verb in ("apply", "revert"):
        made.run(verb, "--target", tree)
        assert (tree / "vllm/a.py").read_bytes() == absorbed


# --- 8


@pytest.fixture
def newer(series: Series) -> Series:
    """Version 2: a patch changed, a file no longer touched, an overlay file changed, dropped and added."""
    name, after, _ = series.patches[0]
    assert name == "first"
    again = after["vllm/a.py"].replace(b"line 10\n", b"line ten\n")
    made = Series(series.base).add(name, {"vllm/a.py": again})
    overlay = {"vllm/new/logic.py": b"ANSWER = 43\n", "vllm/other.py": b"\n"}
    return made.add("third", {"vllm/a.py": again.replace(b"line 25\n", b"")}, overlay)


def test_trap_08_an_edited_patch_set_replaces_the_older_one(
    made: Project, site: Path, series: Series, newer: Series, tmp_path: Path
) -> None:
    before = snapshot(site)
    made.run("--target", site)
    made.write(newer)
    status = made.json("status", "--target", site)
    assert (status["exit"], status["state"]) == (1, "other-patch-set")
    assert made.json("--target", site)["outcome"] == "applied"
    assert made.run("verify", "--target", site).code == 0

    clean = lay_installed(tmp_path / "clean", series.base)
    made.run("--target", clean)
    assert snapshot(site) == snapshot(clean)
    assert (site / "vllm/sub/b.py").read_bytes() == series.base["vllm/sub/b.py"]
    made.run("revert", "--target", site)
    assert snapshot(site) == before


def test_trap_08_a_newer_set_can_take_an_older_one_off(
    made: Project, site: Path, newer: Series
) -> None:
    before = snapshot(site)
    made.run("--target", site)
    made.write(newer)
    assert made.json("revert", "--target", site)["outcome"] == "reverted"
    assert snapshot(site) == before


def test_trap_08_without_a_record_the_older_set_is_refused(
    made: Project, tree: Path, newer: Series
) -> None:
    made.run("--target", tree)
    (tree / "vllm/b12x_patchset.py").unlink()
    made.write(newer)
    before = snapshot(tree)
    assert made.run("--target", tree).code == 3
    assert snapshot(tree) == before


def test_trap_08_a_forged_record_is_not_believed(made: Project, tree: Path, newer: Series) -> None:
    made.run("--target", tree)
    marker = tree / "vllm/b12x_patchset.py"
    digest = made.json("status", "--target", tree)["patches"][0]["files"][0]["found"]
    marker.write_bytes(marker.read_bytes().replace(digest.encode(), b"0" * 64))
    made.write(newer)
    before = snapshot(tree)
    assert made.run("--target", tree).code == 3
    assert snapshot(tree) == before


# --- 9


def test_trap_09_a_crlf_file_is_refused_by_name(made: Project, tree: Path) -> None:
    (tree / "vllm/a.py").write_bytes(A.replace(b"\n", b"\r\n"))
    before = snapshot(tree)
    result = made.run("--target", tree)
    assert result.code == 3
    assert "line endings" in result.err
    assert snapshot(tree) == before


def test_trap_09_a_mixed_file_is_refused_by_name(made: Project, tree: Path) -> None:
    (tree / "vllm/a.py").write_bytes(A.replace(b"line 7\n", b"line 7\r\n"))
    result = made.run("--target", tree)
    assert (result.code, "line endings" in result.err) == (3, True)


def test_trap_09_a_converted_patch_is_refused_by_name(made: Project, tree: Path) -> None:
    patch = made.root / "patches/first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(tree)
    result = made.run("--target", tree)
    assert result.code == 4
    assert "line endings" in result.err
    assert snapshot(tree) == before


def test_trap_09_a_crlf_base_is_patched_as_it_is(tmp_path: Path) -> None:
    old = A.replace(b"\n", b"\r\n")
    new = old.replace(b"line 20\r\n", b"line twenty\r\n")
    made, tree = single(tmp_path, old, new)
    place(tmp_path, ".gitattributes", b"* text eol=lf\n")
    assert made.run("--target", tree).code == 0
    assert (tree / "vllm/a.py").read_bytes() == new
    made.run("revert", "--target", tree)
    assert (tree / "vllm/a.py").read_bytes() == old


def test_trap_09_this_repository_keeps_patches_lf() -> None:
    if shutil.which("git") is None or not (REPO / ".git").exists():
        pytest.skip("needs git and a checkout of this repository")
    out = subprocess.run(
        ["git", "check-attr", "text", "eol", "--", "patches/any.patch"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "text: set" in out
    assert "eol: lf" in out
