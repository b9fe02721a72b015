# SPDX-License-Identifier: Apache-2.0
"""All or nothing: a run is stopped at every single write; the tree must end as old or as new (trap 14).

The points are found by watching the run (faults.py), so a write that is added later is stopped at too.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from apply import faults
from apply.factory import Project, Series, lay_installed, place
from apply.factory import snapshot as everything
from b12x_overlay.patching import engine, journal, patchset, transaction
from b12x_overlay.patching.patchset import PatchSet
from b12x_overlay.patching.target import at_folder
from b12x_overlay.patching.tree import Tree

Act = Callable[[Path], engine.Outcome]


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file but compiled ones, which are a cache and may go at any time."""
    return {name: value for name, value in everything(root).items() if "__pycache__" not in name}


class Case:
    """A run from one state of an installed package to another, both known byte for byte."""

    def __init__(self, folder: Path, start: Path, act: Act, patch_set: PatchSet) -> None:
        self.folder = folder
        self.start = start
        self.act = act
        self.patch_set = patch_set
        self.old = snapshot(start)
        end = self.copy("end")
        act(end)
        self.new = snapshot(end)
        assert self.new != self.old
        self.points = faults.points(self.copy("count"), lambda: act(self.folder / "count"))

    def copy(self, name: str) -> Path:
        """A fresh package in the old state."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.start, target)
        return target

    def stopped(self, how: str) -> Iterator[tuple[int, str, Path]]:
        """For every point: how the run ended, and the package it left."""
        for point, kind in enumerate(self.points):
            if how.startswith("full") and kind not in faults.FILLING:
                continue
            site = self.copy("now")
            end, _ = faults.stop_at(point, site, partial(self.act, site), how)
            yield point, end, site


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: these tests wait for the disk thousands of times."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="b12x-overlay-test-", dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["apply", "revert", "upgrade"])
def case(request: pytest.FixtureRequest, made: Project, quick: Path, series: Series) -> Case:
    start = lay_installed(quick / "start", series.base)
    place(start, "vllm/__pycache__/a.cpython-311.pyc", b"compiled")
    patch_set = load(made)
    if request.param == "apply":
        return Case(quick, start, lambda site: engine.apply(at_folder(site), patch_set), patch_set)
    engine.apply(at_folder(start), patch_set)
    place(start, "vllm/new/__pycache__/logic.cpython-311.pyc", b"compiled")
    if request.param == "revert":
        return Case(quick, start, lambda site: engine.revert(at_folder(site), patch_set), patch_set)
    first = series.patches[0][1]["vllm/a.py"]
    overlay = {"vllm/new/logic.py": b"ANSWER = 43\n", "vllm/newer/deep/x.py": b"\n"}
    made.write(Series(series.base).add("first", {"vllm/a.py": first + b"# 2\n"}, overlay))
    newer = load(made)
    return Case(quick, start, lambda site: engine.apply(at_folder(site), newer), newer)


def load(made: Project) -> PatchSet:
    return patchset.load(made.root / "patches", made.root / "overlay")


def test_killed_at_every_write(case: Case) -> None:
    ends = set()
    for point, end, site in case.stopped("kill"):
        assert end == faults.KILLED
        found = {
            name: value for name, value in snapshot(site).items() if "b12x-overlay" not in name
        }
        for name, value in found.items():  # no file is ever half written
            assert value in (case.old.get(name), case.new.get(name)), (point, name)
        left = journal.unfinished(Tree(site))
        status = engine.status(at_folder(site), case.patch_set)
        if left is None:
            assert snapshot(site) in (case.old, case.new), point
        else:
            assert status.outcome == "interrupted"
            assert status.code == 1
            other = site.with_name("other")
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(site, other)
            transaction.recover(Tree(other))
            assert snapshot(other) == (case.new if left.committed else case.old), point
            ends.add(left.committed)
        assert case.act(site).code == 0
        assert snapshot(site) == case.new, point
        assert not list(site.rglob("a.*.pyc")), point
    assert ends == {True, False}  # both rolling back and rolling forward were met


def test_a_full_disk_leaves_the_old_tree(case: Case) -> None:
    refused = 0
    for how in ("full-once", "full"):
        for point, end, site in case.stopped(how):
            if end == faults.DONE:
                assert snapshot(site) == case.new, (how, point)
                continue
            assert end == "exit 9", (how, point)
            refused += 1
            if (
                journal.unfinished(Tree(site)) is not None
            ):  # no room even to undo: the next run does
                transaction.recover(Tree(site))
                assert snapshot(site) in (case.old, case.new), (how, point)
            else:
                assert snapshot(site) == case.old, (how, point)
            assert case.act(site).code == 0
            assert snapshot(site) == case.new, (how, point)
    assert refused > 10


def test_ctrl_c_leaves_old_or_new(case: Case) -> None:
    ends = set()
    for point, end, site in case.stopped("interrupt"):
        found = snapshot(site)
        assert found in (case.old, case.new), point
        ends.add((end, found == case.new))
    assert ("exit 9", False) in ends
    assert ("exit 9", True) in ends  # too late to stop: finished first, then interrupted


def test_the_command_names_finishes_and_undoes_an_interrupted_run(
    made: Project, site: Path
) -> None:
    old = snapshot(site)
    patch_set = load(made)
    points = len(faults.points(site, lambda: engine.apply(at_folder(site), patch_set)))
    made.run("revert", "--target", site)
    assert snapshot(site) == old
    for point, word in ((points // 3, "undo it"), (points - 4, "complete it")):
        faults.stop_at(point, site, lambda: engine.apply(at_folder(site), patch_set), "kill")
        held = snapshot(site)
        status = made.run("status", "--target", site)
        assert status.code == 1
        assert "interrupted" in status.out
        assert word in status.out
        assert made.run("--target", site, "--dry-run").code == 1
        assert snapshot(site) == held
        done = made.json("revert", "--target", site)
        assert done["exit"] == 0
        assert any("interrupted run of apply" in note for note in done["notes"])
        assert snapshot(site) == old


def test_a_reinstall_after_an_interruption_is_not_overwritten(
    made: Project, site: Path, quick: Path
) -> None:
    patch_set = load(made)
    for point in range(200):
        now = quick / "now"
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(site, now)
        faults.stop_at(
            point, now, lambda: engine.apply(at_folder(quick / "now"), patch_set), "kill"
        )
        left = journal.unfinished(Tree(now))
        if left is not None and left.committed:
            break
    (now / "vllm/a.py").write_bytes(b"another release\n")
    assert transaction.recover(Tree(now)) == left
    assert (now / "vllm/a.py").read_bytes() == b"another release\n"
    assert not list(now.rglob("*b12x-overlay*"))


def test_a_damaged_journal_is_named(made: Project, site: Path) -> None:
    place(site, journal.JOURNAL, b"{")
    before = snapshot(site)
    for verb in ("status", "apply", "revert"):
        result = made.run(verb, "--target", site)
        assert result.code == 3
        assert journal.JOURNAL in result.err
    assert snapshot(site) == before


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_a_forged_journal_does_not_leave_the_tree(made: Project, site: Path, name: str) -> None:
    forged = {
        "verb": "apply",
        "state": "commit",
        "folders": [],
        "write": {},
        "delete": {name: ["x"]},
    }
    text = json.dumps(forged)
    place(site, journal.JOURNAL, text.encode())
    assert made.run("--target", site).code == 3
