# SPDX-License-Identifier: Apache-2.0
"""Two runs at once, and locks after a crash (trap 15)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest
from apply.factory import PYTHON, Project, Series, contents, snapshot
from b12x_overlay.patching import lock


def start(made: Project, *args: str | Path) -> subprocess.Popen[str]:
    command = [PYTHON, str(made.command), *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=made.env
    )


def test_trap_15_of_many_runs_one_applies(made: Project, site: Path, series: Series) -> None:
    runs = [start(made, "--target", site, "--json") for _ in range(6)]
    ends = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), ends
    outcomes = sorted(json.loads(out)["outcome"] for out, _ in ends)
    assert outcomes == ["already applied"] * 5 + ["applied"]
    for path, data in series.final().items():
        assert contents(site)[path] == data
    assert not [name for name in contents(site) if "b12x-overlay" in name]


def test_trap_15_a_second_run_waits_and_says_so(made: Project, site: Path) -> None:
    handle = os.open(site / "vllm", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    run = start(made, "--target", site)
    assert run.stderr is not None
    assert "waiting for another run" in run.stderr.readline()
    assert made.run("status", "--target", site).code == 1  # reading waits for nobody
    os.close(handle)
    run.communicate()
    assert run.returncode == 0


def test_trap_15_apply_and_revert_at_once_end_in_one_of_both(made: Project, site: Path) -> None:
    old = snapshot(site)
    made.run("--target", site)
    new = snapshot(site)
    runs = [start(made, verb, "--target", site) for verb in ("apply", "revert") * 3]
    for run in runs:
        run.communicate()
    assert {run.returncode for run in runs} == {0}
    assert snapshot(site) in (old, new)


def test_trap_15_a_stale_git_lock_is_named(made: Project, tree: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tree], check=True)
    (tree / ".git/index.lock").touch()
    before = snapshot(tree)
    for verb in ("apply", "revert"):
        result = made.run(verb, "--target", tree)
        if verb == "apply":
            assert result.code == 3
            assert "index.lock" in result.err
            assert "rm " in result.err
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("left", "command"),
    [
        ("rebase-apply", "git am --abort"),
        ("rebase-merge", "git rebase --abort"),
        ("MERGE_HEAD", "git merge --abort"),
    ],
)
def test_trap_14_git_in_the_middle_of_something_is_named(
    made: Project, tree: Path, left: str, command: str
) -> None:
    subprocess.run(["git", "init", "--quiet", tree], check=True)
    (tree / ".git" / left).mkdir()
    before = snapshot(tree)
    result = made.run("--target", tree)
    assert result.code == 3
    assert left in result.err
    assert command in result.err
    assert snapshot(tree) == before


@pytest.mark.parametrize("by_file", [False, True])
def test_one_holder_at_a_time(
    tmp_path: Path, by_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_file:  # a file system that cannot lock folders
        real = fcntl.flock

        def flock(handle: int, operation: int) -> None:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(errno.EBADF, "folders cannot be locked")
            real(handle, operation)

        monkeypatch.setattr(lock.fcntl, "flock", flock)
    inside, most, waited = 0, 0, []

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with lock.exclusive(tmp_path, lambda: waited.append(1)):
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)  # lets the other threads in, if anything does
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert waited
    assert list(tmp_path.iterdir()) == []
