# SPDX-License-Identifier: Apache-2.0
"""Public faults of patch tools, the kinds about builds and installations (trap numbers in the names).

16 container builds that hide a failure or patch the wrong tree, 17 install paths.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from apply.factory import PYTHON, Project, Series, contents, lay, lay_installed, place, snapshot

# --- 16


def test_trap_16_every_failing_run_says_so(made: Project, tmp_path: Path, series: Series) -> None:
    trees = [lay(tmp_path / name, series.base) for name in "abc"]
    (trees[0] / "vllm/a.py").write_bytes(b"other\n")
    codes = [made.run("--target", tree).code for tree in trees]  # no terminal: stdin is closed
    assert codes == [3, 0, 0]


@pytest.mark.parametrize("keep", [40, 250, -30, -1])
def test_trap_16_a_truncated_patch_is_corrupt_and_not_a_conflict(
    made: Project, tree: Path, keep: int
) -> None:
    patch = made.root / "patches/first.patch"
    patch.write_bytes(patch.read_bytes()[:keep])
    before = snapshot(tree)
    document = made.json("--target", tree)
    assert document["error"]["reason"] == "bad-patch-set"
    result = made.run("--target", tree)
    assert result.code == 4
    assert "truncated" in result.err or "corrupt" in result.err
    assert "first.patch" in result.err
    assert snapshot(tree) == before


def test_trap_16_an_editable_install_is_found_behind_a_stale_copy(
    made: Project, tmp_path: Path, series: Series
) -> None:
    source = lay(tmp_path / "src", series.base)
    venv = make_venv(tmp_path / "venv")
    site = next(venv.glob("lib/python*/site-packages"))
    place(site, "__editable___vllm.py", EDITABLE.format(str(source / "vllm")).encode())
    place(site, "__editable__.vllm.pth", b"import __editable___vllm; __editable___vllm.install()\n")
    info = "vllm-0.33.0.dist-info"
    place(site, f"{info}/METADATA", b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n\n")
    place(site, f"{info}/direct_url.json", b'{"dir_info": {"editable": true}, "url": "file:///x"}')
    place(site, f"{info}/RECORD", b"__editable__.vllm.pth,,\n")
    lay(site, dict.fromkeys(series.base, b"stale\n"))
    before = snapshot(site / "vllm")
    document = made.json("--target", "installed", python=(str(venv / "bin/python"),))
    assert document["target"]["path"] == str(source)
    assert document["outcome"] == "applied"
    assert (source / "vllm/a.py").read_bytes() == series.final()["vllm/a.py"]
    assert snapshot(site / "vllm") == before


EDITABLE = """
import sys, importlib.util
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "vllm":
            return importlib.util.spec_from_file_location(
                name, {0!r} + "/__init__.py", submodule_search_locations=[{0!r}])
def install():
    sys.meta_path.insert(0, Finder)
"""


def make_venv(folder: Path) -> Path:
    """A virtual environment without pip."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    return folder


# --- 17


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu129"])
@pytest.mark.parametrize("isolated", [False, True])
def test_trap_17_the_imported_package_is_found(
    made: Project, tmp_path: Path, series: Series, name: str, version: str, isolated: bool
) -> None:
    venv = make_venv(tmp_path / "venv")
    where = next(venv.glob("lib/python*/site-packages"))
    if name == "dist-packages":
        site, where = where, tmp_path / "usr/lib/python3/dist-packages"
        place(site, "debian.pth", f"{where}\n".encode())
    files = {**series.base, "vllm/__init__.py": b"raise SystemExit('vllm was imported')\n"}
    lay_installed(where, files, version=version)
    flags = ("-I", "-S") if isolated else ()
    document = made.json("--target", "installed", python=(str(venv / "bin/python"), *flags))
    assert document["target"] == {"kind": "installed", "path": str(where), "version": version}
    assert document["outcome"] == "applied"
    assert b"vllm/new/logic.py,sha256=" in contents(where)[f"vllm-{version}.dist-info/RECORD"]


def test_trap_17_another_release_is_refused_with_both_versions(
    made: Project, tmp_path: Path, series: Series
) -> None:
    venv = make_venv(tmp_path / "venv")
    site = next(venv.glob("lib/python*/site-packages"))
    lay_installed(site, series.base, version="0.32.1")
    before = snapshot(site)
    result = made.run("--target", "installed", python=(str(venv / "bin/python"),))
    assert result.code == 3
    assert "0.32.1" in result.err
    assert "0.33.0" in result.err
    assert snapshot(site) == before


def test_trap_17_no_vllm_at_all(made: Project, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv") / "bin/python"
    result = made.run("--target", "installed", python=(str(python),))
    assert result.code == 3
    assert "no vllm to import" in result.err
