# SPDX-License-Identifier: Apache-2.0
"""apply, status, verify and revert on a tree and on an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
from apply.factory import Project, Series, contents, lay, snapshot
from b12x_overlay.patching import manifest, patchset

MARKER = patchset.MARKER


@pytest.fixture(params=["tree", "site"])
def target(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_apply_status_verify_revert(made: Project, target: Path, series: Series) -> None:
    before = snapshot(target)
    assert made.run("status", "--target", target).code == 1
    assert made.run("verify", "--target", target).code == 1
    assert snapshot(target) == before

    applied = made.json("--target", target)
    assert applied["outcome"] == "applied"
    after = contents(target)
    for path, data in series.final().items():
        assert after[path] == data
    assert made.run("status", "--target", target).code == 0
    assert made.run("verify", "--target", target).code == 0

    held = snapshot(target)
    again = made.json("--target", target)
    assert (again["outcome"], again["exit"], again["changed"]) == ("already applied", 0, [])
    assert snapshot(target) == held

    assert made.json("revert", "--target", target)["outcome"] == "reverted"
    assert snapshot(target) == before
    assert made.json("revert", "--target", target)["outcome"] == "not applied"


def test_dry_run_writes_nothing_and_says_what_would_change(made: Project, target: Path) -> None:
    before = snapshot(target)
    dry = made.json("--target", target, "--dry-run")
    assert dry["exit"] == 1
    assert "vllm/a.py" in dry["changed"]
    assert "vllm/new/logic.py" in dry["changed"]
    assert snapshot(target) == before
    made.run("--target", target)
    assert made.run("--target", target, "--dry-run").code == 0
    held = snapshot(target)
    assert made.run("revert", "--target", target, "--dry-run").code == 1
    assert snapshot(target) == held


def test_the_marker_names_the_set_at_run_time(made: Project, target: Path) -> None:
    made.run("--target", target)
    loaded = patchset.load(made.root / "patches", made.root / "overlay")
    names: dict[str, object] = {}
    exec(compile((target / MARKER).read_bytes(), MARKER, "exec"), names)
    assert names["PATCHSET_ID"] == manifest.patchset_id(loaded)
    assert names["MANIFEST"]["patches"][1]["overlay"][1]["path"] == "vllm/new/logic.py"  # type: ignore[index]


def test_the_digest_follows_patches_overlay_and_pin(made: Project, series: Series) -> None:
    def current() -> str:
        return manifest.patchset_id(patchset.load(made.root / "patches", made.root / "overlay"))

    first = current()
    assert current() == first
    (made.root / "overlay/vllm/new/logic.py").write_bytes(b"ANSWER = 43\n")
    second = current()
    made.write(series, revision=2)
    third = current()
    (made.root / "overlay/vllm/new/logic.py").chmod(0o755)
    assert len({first, second, third, current()}) == 4


def test_another_version_is_refused_with_both_versions(
    made: Project, tmp_path: Path, series: Series
) -> None:
    tree = lay(tmp_path / "other", series.base)
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.34.1\n")
    before = snapshot(tree)
    result = made.run("--target", tree)
    assert result.code == 3
    assert "0.34.1" in result.err
    assert "0.33.0" in result.err
    assert snapshot(tree) == before
    assert made.json("status", "--target", tree)["state"] == "wrong-version"


def test_a_folder_inside_the_tree_is_no_target(made: Project, tree: Path) -> None:
    result = made.run("--target", tree / "vllm")
    assert result.code == 3
    assert f"--target {tree}" in result.err
