# SPDX-License-Identifier: Apache-2.0
"""The run is killed around each of its steps that writes; every time the next run puts all in order.

A git on PATH logs the commands and kills its parent, the sync, with SIGKILL. Between two commands that only read a
kill leaves what it leaves before the next one that writes, so those are left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from b12x_overlay.git import environment
from b12x_overlay.sync.cli import main
from sync.repos import TEXT, Repo, one_fragment

KILLER = """#!/bin/sh
# builtins only: this runs thousands of times
echo "$1 $2" >> {log}
read -r count < {log}.count
echo $((count + 1)) > {log}.count
if [ $((count + 1)) -eq {at} ]; then kill -9 $PPID; exit 1; fi
exec {git} "$@"
"""
WRITES = (
    "worktree add",
    "worktree remove",
    "cherry-pick",
    "reset",
    "rm",
    "checkout",
    "commit",
    "add",
    "update-ref",
    "push",
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """canonical has two changes, one with a fragment and one with a kept pin; beta has one of its own."""
    repo = Repo.create(tmp_path_factory.mktemp("kill") / "repo", {"pin.txt": "1\n"})
    repo.on("beta").edit("[beta] own", 30, "beta")
    repo.on("main").edit("one", 3, "x", files=one_fragment("vllm-two"))
    repo.edit("two", 10, "y", files={"pin.txt": "2\n"})
    repo.git("switch", "-q", "--detach")
    return repo.path


def forked(repo: Repo, *args: str, path: Path | None = None) -> int:
    """Run the command in a forked child; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.environ.clear()
            os.environ.update(
                {key: value for key, value in repo.env.items() if not key.startswith("GIT_AUTHOR")}
            )
            if path is not None:
                os.environ["PATH"] = f"{path}:{os.environ['PATH']}"
            environment.cache_clear()
            lines = (
                []
                if args[0] in ("--continue", "--abort")
                else ["--canonical", "main", "--beta", "beta"]
            )
            status = main(["--repo", str(repo.path), *lines, *args])
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killer(folder: Path, at: int) -> Path:
    """A folder with a git that kills the sync at its command number *at* (0: never)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "log.count").write_text("0\n")
    script = folder / "git"
    script.write_text(KILLER.format(log=folder / "log", at=at, git=shutil.which("git")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def points(log: Path) -> list[int]:
    """The commands before which to kill: each that writes, and the one behind it."""
    commands = log.read_text().splitlines()
    writing = [at for at, command in enumerate(commands, 1) if command.startswith(WRITES)]
    assert len(writing) >= 8, commands
    return sorted({at + later for at in writing for later in (0, 1) if at + later <= len(commands)})


def clean(repo: Repo) -> None:
    assert len(repo.git("worktree", "list").splitlines()) == 1
    assert repo.git("for-each-ref", "--format=%(refname)", "refs/heads").split() == [
        "refs/heads/beta",
        "refs/heads/main",
    ]
    assert [one.name for one in (repo.path / ".git" / "sync-beta").iterdir()] == ["lock"]
    assert repo.git("status", "--porcelain") == ""


def fresh(template: Path, work: Path, mode: str) -> Repo:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(template, work / "repo", symlinks=True)
    repo = Repo(work / "repo")
    if mode == "--push":
        shutil.copytree(template, work / "remote", symlinks=True)
        repo.git("remote", "add", "origin", str(work / "remote"))
    return repo


@pytest.mark.parametrize("mode", ["--land", "--push"])
def test_killed_around_each_write(template: Path, tmp_path: Path, mode: str) -> None:
    flags = (mode, "--keep", "pin.txt")
    old = Repo(template).tip("beta")
    bin_folder, work = tmp_path / "bin", tmp_path / "work"
    assert forked(fresh(template, work, mode), *flags, path=killer(bin_folder, 0)) == 0
    for at in points(bin_folder / "log"):
        repo = fresh(template, work, mode)
        code = forked(repo, *flags, path=killer(bin_folder, at))
        assert code == -signal.SIGKILL, f"command {at} ended with {code}"
        subjects = repo.subjects(f"{old}..beta")  # old or new, never between
        assert not subjects or (mode == "--land" and len(subjects) == 3)
        assert repo.git("status", "--porcelain") == ""

        assert forked(repo, *flags) == 0, f"after a kill at command {at}"
        there = Repo(work / "remote") if mode == "--push" else repo
        branch = "sync/canonical-to-beta" if mode == "--push" else "beta"
        assert there.subjects(f"{old}..{branch}") == [
            "one",
            "two",
            "Record the canonical sync 20261002",
        ]
        assert there.file(branch, "pin.txt") == "1\n"
        clean(repo)


def test_killed_while_going_on_after_a_resolution(template: Path, tmp_path: Path) -> None:
    """A person's resolution is never lost, around whichever write the run dies."""
    base = tmp_path / "base"
    shutil.copytree(template, base, symlinks=True)
    made = Repo(base)
    made.on("beta").edit("[beta] clash", 3, "beta")
    made.git("switch", "-q", "--detach")
    bin_folder, work = tmp_path / "bin", tmp_path / "work"

    def resolved() -> Repo:
        repo = fresh(base, work, "--land")
        told = repo.sync("--land", "--keep", "pin.txt")
        tree = Path(told.json["conflict"]["commands"][0].removeprefix("cd "))
        text = TEXT.replace("line 3\n", "beta x\n").replace("line 30\n", "beta\n")
        (tree / "code.py").write_text(text)
        repo.git("-C", str(tree), "add", "code.py")
        return repo

    assert forked(resolved(), "--continue", path=killer(bin_folder, 0)) == 0
    for at in points(bin_folder / "log"):
        repo = resolved()
        code = forked(repo, "--continue", path=killer(bin_folder, at))
        assert code == -signal.SIGKILL, f"command {at} ended with {code}"
        again = repo.sync("--land", "--keep", "pin.txt")
        if again.code != 0:  # the run had not landed yet: it waits for the person
            assert again.json["error"]["reason"] == "unfinished", again.err
            assert forked(repo, "--continue") == 0, f"after a kill at command {at}"
        assert "beta x\n" in repo.file("beta", "code.py")
        assert repo.file("beta", "pin.txt") == "1\n"
        clean(repo)


def test_two_runs_at_once(template: Path, tmp_path: Path) -> None:
    """One of them lands, the other refuses or finds nothing left to do; the lock dies with its process."""
    shutil.copytree(template, tmp_path / "repo", symlinks=True)
    repo = Repo(tmp_path / "repo")
    runs = [repo.start_sync("--land", "--keep", "pin.txt") for _ in range(2)]
    codes = sorted(run.wait(timeout=120) for run in runs)
    told = [run.stderr.read() if run.stderr else "" for run in runs]
    assert codes in ([0, 0], [0, 3]), told
    assert repo.subjects("main~2..beta").count("one") == 1
    clean(repo)


def test_terminated_and_interrupted_runs_clean_up(template: Path, tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)):
        shutil.copytree(template, tmp_path / str(number) / "repo", symlinks=True)
        repo = Repo(tmp_path / str(number) / "repo")
        slow = killer(tmp_path / "bin", 0) / "git"
        slow.write_text(
            f'#!/bin/sh\ncase "$1" in cherry-pick) sleep 3;; esac\nexec {shutil.which("git")} "$@"\n'
        )
        before = repo.snapshot()
        run = repo.start_sync("--land", env={"PATH": f"{slow.parent}:{os.environ['PATH']}"})
        waited = time.monotonic() + 60
        while not (repo.path / ".git" / "worktrees").exists() and time.monotonic() < waited:
            time.sleep(0.05)
        time.sleep(0.3)
        run.send_signal(number)
        out, err = run.communicate(timeout=120)
        assert run.returncode == code, (out, err)
        if (repo.path / ".git" / "worktrees").exists():
            (repo.path / ".git" / "worktrees").rmdir()
        assert repo.snapshot() == before
        clean(repo)


def test_a_stale_index_lock_is_told_and_nothing_is_written(template: Path, tmp_path: Path) -> None:
    """The user's own index lock does not matter; a lock on beta's ref does."""
    shutil.copytree(template, tmp_path / "repo", symlinks=True)
    repo = Repo(tmp_path / "repo")
    (repo.path / ".git" / "index.lock").touch()
    (repo.path / ".git" / "refs" / "heads" / "beta.lock").touch()
    told = repo.sync("--land", "--keep", "pin.txt")
    assert told.code == 3
    assert "beta.lock" in told.err
    (repo.path / ".git" / "refs" / "heads" / "beta.lock").unlink()
    assert repo.sync("--land", "--keep", "pin.txt").code == 0


def test_a_damaged_state_file_is_named(template: Path, tmp_path: Path) -> None:
    shutil.copytree(template, tmp_path / "repo", symlinks=True)
    repo = Repo(tmp_path / "repo")
    (repo.path / ".git" / "sync-beta").mkdir()
    (repo.path / ".git" / "sync-beta" / "state.json").write_text("{")
    told = repo.sync("--land")
    assert told.code == 4
    assert "state.json is damaged" in told.err
    subprocess.run(["rm", repo.path / ".git" / "sync-beta" / "state.json"], check=True)
    assert repo.sync("--land", "--keep", "pin.txt").code == 0
