# SPDX-License-Identifier: Apache-2.0
"""Public faults of patch tools, the kinds about files on disk (trap numbers in the names).

5 hard links, 10 modes, 11 symbolic links, 12 read-only trees, 13 odd bytes, 18 bytecode, 19 leftovers that import. 20 (import order) has nothing to catch: patches change source, nothing is
rebound at run time. 21, 22 and 23 belong to the sync, the fragments and the drift job.
"""

from __future__ import annotations

import contextlib
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apply.conftest import A
from apply.factory import (
    REPO,
    Project,
    Series,
    lay,
    lay_installed,
    patch_text,
    pin_text,
    place,
    project,
    run_python,
    snapshot,
)

NOBODY = 65534

# --- 5


def test_trap_05_the_package_cache_behind_hard_links_keeps_its_bytes(
    made: Project, site: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(site, cache, copy_function=os.link)
    shutil.rmtree(site)
    shutil.copytree(cache, site, copy_function=os.link)
    before = snapshot(cache)
    inodes = {path: path.stat().st_ino for path in cache.rglob("*")}
    for verb in ("apply", "revert"):
        assert made.run(verb, "--target", site).code == 0
        assert snapshot(cache) == before
        assert {path: path.stat().st_ino for path in cache.rglob("*")} == inodes


def test_trap_05_overlay_sources_are_copied_not_linked(made: Project, tree: Path) -> None:
    made.run("--target", tree)
    source, landed = made.root / "overlay/vllm/new/logic.py", tree / "vllm/new/logic.py"
    assert not source.samefile(landed)
    assert landed.stat().st_nlink == 1


# --- 10


@pytest.mark.parametrize("mode", [0o444, 0o755, 0o644, 0o600, 0o664])
def test_trap_10_modes_survive_apply_and_revert(made: Project, tree: Path, mode: int) -> None:
    path = tree / "vllm/a.py"
    path.chmod(mode)
    for verb in ("apply", "revert"):
        assert made.run(verb, "--target", tree, "--dry-run").code == 1
        assert made.run(verb, "--target", tree).code == 0
        assert path.stat().st_mode & 0o7777 == mode


def test_trap_10_new_files_get_the_packages_mode_and_their_own_exec_bit(
    made: Project, tree: Path
) -> None:
    (made.root / "overlay/vllm/new/logic.py").chmod(0o755)
    (tree / "vllm/__init__.py").chmod(0o664)
    made.run("--target", tree, env={}, umask=0o077)
    assert (tree / "vllm/new/__init__.py").stat().st_mode & 0o777 == 0o664
    assert (tree / "vllm/new/logic.py").stat().st_mode & 0o777 == 0o775
    assert (tree / "vllm/new").stat().st_mode & 0o777 == (tree / "vllm").stat().st_mode & 0o777


def test_trap_10_a_mode_only_patch_is_applied_seen_and_reverted(tmp_path: Path) -> None:
    made = project(tmp_path / "project").write(Series({}))
    made.write_patch(
        "mode", b"diff --git a/vllm/a.py b/vllm/a.py\nold mode 100644\nnew mode 100755\n"
    )
    text = pin_text() + patch_text("mode", {"vllm/a.py": (A, A)}, {})
    (made.root / "patches/patchset.toml").write_text(text)
    tree = lay(tmp_path / "tree", {"vllm/a.py": A})
    (tree / "vllm/a.py").chmod(0o644)
    before = snapshot(tree)
    assert made.run("status", "--target", tree).code == 1
    assert made.run("--target", tree).code == 0
    assert (tree / "vllm/a.py").stat().st_mode & 0o777 == 0o755
    assert made.json("--target", tree)["outcome"] == "already applied"
    assert made.run("revert", "--target", tree).code == 0
    assert snapshot(tree) == before


# --- 11


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside the tree, with a copy of a touched file."""
    return lay(tmp_path / "outside", {"vllm/a.py": A, "vllm/sub/b.py": b"x\n"})


def refused_and_untouched(made: Project, tree: Path, outside: Path, verb: str = "apply") -> None:
    before, far = snapshot(tree), snapshot(outside)
    document = made.json(verb, "--target", tree)
    assert document["exit"] == 3
    assert "symlink" in {file["reason"] for patch in document["patches"] for file in patch["files"]}
    assert snapshot(tree) == before
    assert snapshot(outside) == far


def test_trap_11_a_touched_file_is_a_link(made: Project, tree: Path, outside: Path) -> None:
    (tree / "vllm/a.py").unlink()
    (tree / "vllm/a.py").symlink_to(outside / "vllm/a.py")
    refused_and_untouched(made, tree, outside)


def test_trap_11_a_folder_on_the_way_is_a_link(made: Project, tree: Path, outside: Path) -> None:
    shutil.rmtree(tree / "vllm/sub")
    (tree / "vllm/sub").symlink_to(outside / "vllm/sub")
    refused_and_untouched(made, tree, outside)


@pytest.mark.parametrize("dangling", [False, True])
def test_trap_11_an_overlay_destination_is_a_link(
    made: Project, tree: Path, outside: Path, dangling: bool
) -> None:
    (tree / "vllm/new").mkdir()
    (tree / "vllm/new/logic.py").symlink_to(outside / ("nothing" if dangling else "vllm/a.py"))
    refused_and_untouched(made, tree, outside)


def test_trap_11_an_overlay_folder_is_a_link(made: Project, tree: Path, outside: Path) -> None:
    (tree / "vllm/new").symlink_to(outside)
    refused_and_untouched(made, tree, outside)
    assert not (outside / "logic.py").exists()


def test_trap_11_temporary_names_are_not_followed(made: Project, tree: Path, outside: Path) -> None:
    victim = outside / "vllm/a.py"
    (tree / "vllm/.a.py.b12x-overlay.tmp").symlink_to(victim)
    (tree / "vllm/.b12x-overlay.journal.b12x-overlay.tmp").symlink_to(victim)
    made.run("--target", tree)
    assert victim.read_bytes() == A


def test_trap_11_a_link_to_the_whole_tree_is_fine(
    made: Project, tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "alias").symlink_to(tree)
    assert made.run("--target", tmp_path / "alias").code == 0
    assert made.run("status", "--target", tree).code == 0


# --- 12


@pytest.fixture
def public(series: Series) -> Iterator[tuple[Project, Path]]:
    """A project and a package that another user can reach (pytest's own folder is private)."""
    if os.geteuid() != 0:
        pytest.skip("changing the user needs root")
    folder = Path(tempfile.mkdtemp(prefix="b12x-overlay-test-"))
    try:
        folder.chmod(0o755)
        made = project(folder / "project").write(series)
        yield made, lay_installed(folder / "site-packages", series.base)
    finally:
        shutil.rmtree(folder)


def as_nobody() -> dict[str, Any]:
    """Arguments that run the command as another user, with a Python that this user may run."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", code], check=False, cwd="/", **user).returncode == 0:
                return {"python": (python,), **user}
    pytest.skip("no Python 3.11 or newer that another user can run")


def own(root: Path, user: int) -> None:
    for path in [root, *root.rglob("*")]:
        os.chown(path, user, user, follow_symlinks=False)


def test_trap_12_a_folder_that_cannot_be_written_undoes_the_rest(
    public: tuple[Project, Path],
) -> None:
    made, site = public
    own(site, NOBODY)
    own(site / "vllm/sub", 0)
    (site / "vllm/sub").chmod(0o555)
    before = snapshot(site)
    result = made.run("--target", site, **as_nobody())
    assert result.code == 3
    assert "vllm/sub" in result.err
    assert "nothing was changed" in result.err
    assert snapshot(site) == before


def test_trap_12_reading_verbs_work_on_a_read_only_package(public: tuple[Project, Path]) -> None:
    made, site = public
    made.run("--target", site)
    before = snapshot(site)
    nobody = as_nobody()
    for verb in ("status", "verify", "apply"):
        result = made.run(verb, "--target", site, **nobody)
        assert result.code == 0, result.text
    assert snapshot(site) == before
    assert made.run("revert", "--target", site, **nobody).code == 3
    assert snapshot(site) == before


def test_trap_12_root_gives_new_files_to_the_trees_owner(public: tuple[Project, Path]) -> None:
    made, site = public
    own(site, NOBODY)
    made.run("--target", site)
    assert {path.stat().st_uid for path in site.rglob("*")} == {NOBODY}


# --- 13

ODD = (
    b"# caf\xe9 latin-1\nnext\x85line\npage\x0cbreak\nlone\rreturn\n"
    + "u\u2028v\u2029w\n".encode()
    + b"tab\t \nplain\n"
    b"x = 1\ny = 2\nz = 3\nlast without end"
)


def test_trap_13_bytes_survive_as_git_apply_has_them(tmp_path: Path) -> None:
    new = ODD.replace(b"lone\rreturn", b"lone\rreturn\xff\x0c").replace(b"y = 2", b"y = 3\x85\xe9")
    new = new.replace(b"last without end", b"last\x0b with another")
    series = Series({"vllm/a.py": ODD}).add("one", {"vllm/a.py": new})
    made, tree = project(tmp_path / "project").write(series), lay(tmp_path / "tree", series.base)
    assert made.run("--target", tree).code == 0
    clean = lay(tmp_path / "clean", series.base)
    subprocess.run(["git", "init", "--quiet", clean], check=True)
    subprocess.run(
        ["git", "apply", made.root / "patches/one.patch"], cwd=clean, check=True, env=made.env
    )
    assert (tree / "vllm/a.py").read_bytes() == (clean / "vllm/a.py").read_bytes() == new
    made.run("revert", "--target", tree)
    assert (tree / "vllm/a.py").read_bytes() == ODD


# --- 18


@pytest.mark.parametrize("kind", list(py_compile.PycInvalidationMode))
def test_trap_18_no_process_runs_the_old_bytecode(
    tmp_path: Path, kind: py_compile.PycInvalidationMode
) -> None:
    series = Series({"vllm/a.py": b"VALUE = 1\n"}).add("one", {"vllm/a.py": b"VALUE = 2\n"})
    made = project(tmp_path / "project").write(series)
    tree = lay(tmp_path / "tree", series.base)
    for verb, wanted in (("apply", "2"), ("revert", "1")):
        source = tree / "vllm/a.py"
        py_compile.compile(str(source), invalidation_mode=kind)
        stamp = source.stat()
        assert made.run(verb, "--target", tree).code == 0
        os.utime(
            source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns)
        )  # the same second and the same size
        assert run_python("import vllm.a; print(vllm.a.VALUE)", tree) == wanted


def test_trap_18_verify_finds_bytecode_of_other_bytes(made: Project, tree: Path) -> None:
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tree / "vllm/sub/b.py"), invalidation_mode=mode)
    kept = next((tree / "vllm/sub/__pycache__").glob("b.*.pyc"))
    data = kept.read_bytes()
    made.run("--target", tree)
    place(tree, f"vllm/sub/__pycache__/{kept.name}", data)
    assert made.run("status", "--target", tree).code == 0
    verified = made.run("verify", "--target", tree)
    assert verified.code == 1
    assert kept.name in verified.text


def test_trap_18_other_modules_keep_bytecode_and_times(made: Project, tree: Path) -> None:
    other = place(tree, "vllm/other.py", b"x = 1\n")
    py_compile.compile(str(other))
    before = {
        path: path.stat().st_mtime_ns for path in [other, *(tree / "vllm/__pycache__").iterdir()]
    }
    made.run("--target", tree)
    assert {path: path.stat().st_mtime_ns for path in before} == before


# --- 19


def test_trap_19_nothing_importable_is_left_behind(made: Project, tree: Path) -> None:
    made.run("--target", tree)
    assert run_python("import vllm.new.logic; print(vllm.new.logic.ANSWER)", tree) == "42"
    assert list(tree.rglob("vllm/new/__pycache__/*.pyc"))
    made.run("revert", "--target", tree)
    assert not (tree / "vllm/new").exists()
    assert not [path for path in tree.rglob("__pycache__") if not any(path.iterdir())]
    code = "import importlib.util as u, vllm; print(u.find_spec('vllm.new'))"
    assert run_python(code, tree) == "None"


def test_trap_19_foreign_files_in_our_folder_are_kept(made: Project, tree: Path) -> None:
    made.run("--target", tree)
    mine = place(tree, "vllm/new/notes.txt", b"mine\n")
    assert made.run("revert", "--target", tree).code == 0
    assert mine.read_bytes() == b"mine\n"
    assert [path.name for path in (tree / "vllm/new").iterdir()] == ["notes.txt"]


def test_trap_19_an_upstream_file_is_never_overwritten(made: Project, tree: Path) -> None:
    theirs = place(tree, "vllm/new/logic.py", b"upstream\n")
    before = snapshot(tree)
    result = made.run("--target", tree)
    assert result.code == 3
    assert "vllm/new/logic.py" in result.err
    assert theirs.read_bytes() == b"upstream\n"
    assert snapshot(tree) == before


def test_no_overlay_path_exists_in_the_pinned_vllm() -> None:
    """The rule behind it, on the real files."""
    from b12x_overlay.patching import patchset
    from support import paths

    stock = paths.TEST_ENV / "stock"
    if not stock.is_dir():
        pytest.skip(f"{stock} is missing; scripts/test makes it")
    loaded = patchset.load(REPO / "patches", REPO / "overlay")
    assert [file.path for file in loaded.overlay if (stock / file.path).exists()] == []
