# SPDX-License-Identifier: Apache-2.0
"""Wrong input of sync-beta: named with what was wanted, and nothing is changed; slips of the pen are warned of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sync.repos import COMMAND, Repo, one_fragment


@pytest.fixture
def ahead(repo: Repo) -> Repo:
    """canonical has one change that beta lacks."""
    repo.on("main").edit("change", 3, "x")
    repo.git("switch", "-q", "--detach")
    return repo


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--canonical", "nowhere"], 2, "--canonical nowhere is no branch"),
        (["--beta", "nowhere"], 2, "--beta nowhere is no branch"),
        (["--beta", "main"], 2, "both"),
        (["--canonical", "--all"], 2, ""),
        (["--beta", "-x"], 2, ""),
        (["--beta", "HEAD~1"], 2, "no branch"),
        (["--remote", "nowhere"], 2, "no remote of that name; it has: none"),
        (["--remote", "/nowhere/at all"], 4, "cannot be read"),
        (["--repo", "/nowhere"], 2, "no folder"),
        (["--repo", "/"], 2, "no git repository"),
        (["--lines", "/nowhere.toml"], 2, "/nowhere.toml"),
        (["--folder", "../x"], 2, "inside the repository"),
        (["--folder", "/x"], 2, "inside the repository"),
        (["--folder", "code.py"], 2, "code.py is a file"),
        (["--folder", ""], 2, "inside the repository"),
        (["--component", "V x"], 2, "component"),
        (["--author", "@me"], 2, "without @"),
        (["--work-branch", "a..b"], 2, "no branch name"),
        (["--work-branch", "beta"], 2, "branch of its own"),
        (["--report", "/nowhere/x"], 2, "does not exist"),
        (["--report", "/"], 2, "is a folder"),
    ],
)
def test_bad_input(ahead: Repo, arguments: list[str], code: int, word: str) -> None:
    before = ahead.snapshot()
    told = ahead.sync("--land", *arguments)
    assert told.code == code, told.err
    assert word in told.err
    assert "Traceback" not in told.err
    assert not told.out or told.json["outcome"] == "failed"
    assert ahead.snapshot() == before


def test_usage(ahead: Repo) -> None:
    for flags in ((), ("--land", "--push"), ("--push", "--no-remote"), ("--dry-run", "--abort")):
        assert ahead.sync(*flags).code == 2
    assert ahead.sync("--push").code == 2  # this repository has no remote
    assert ahead.sync("--dry-run", canonical="").code == 2


def start(folder: Path, *arguments: str, repo: Repo) -> subprocess.CompletedProcess[str]:
    """Run the command in *folder*, without the flags that `Repo.sync` adds."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=repo.env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_lines_file_is_found_from_a_folder_of_the_repository(ahead: Repo) -> None:
    ahead.on("main").commit(
        "lines", {".ci/lines.toml": '[lines]\ncanonical = "main"\nbeta = "beta"\n'}
    )
    below = ahead.path / "some" / "folder"
    below.mkdir(parents=True)
    done = start(below, "--repo", ".", "--dry-run", repo=ahead)
    assert done.returncode == 1, done.stderr
    assert "bring" in done.stdout


def test_a_folder_that_is_no_repository_is_called_that(ahead: Repo, tmp_path: Path) -> None:
    """Without flags for the lines, as most people call it: not "--canonical must be given"."""
    (tmp_path / "empty").mkdir()
    for place, word in (("empty", "is no git repository"), ("nowhere", "is no folder")):
        done = start(tmp_path, "--repo", place, "--dry-run", repo=ahead)
        assert done.returncode == 2, done.stderr
        assert word in done.stderr
    done = start(tmp_path, "--repo", str(ahead.path), "--dry-run", repo=ahead)
    assert done.returncode == 2
    assert f"{ahead.path}/.ci/lines.toml does not exist" in done.stderr


def test_a_current_folder_that_has_gone(ahead: Repo, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "--repo", str(ahead.path), "--canonical", "main", "--beta", "beta",
         "--dry-run"], cwd=gone, env=ahead.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr


def test_the_way_to_a_first_beta_is_said(ahead: Repo) -> None:
    ahead.git("branch", "-D", "beta")
    told = ahead.sync("--dry-run")
    assert told.code == 2
    assert f"git -C {ahead.path} branch beta COMMIT" in told.err


def test_rules_that_name_nothing_are_warned_of(ahead: Repo) -> None:
    """A pin with a slip in its name would otherwise be overwritten without a word."""
    ahead.on("main").commit("fragment", one_fragment("vllm-two"))
    ahead.git("switch", "-q", "--detach")
    told = ahead.sync("--dry-run", "--keep", "cude.py", "--keep", "other.*", "--folder", "chnages")
    assert told.code == 1, told.err
    assert len(told.json["warnings"]) == 2
    assert "warning: --keep cude.py" in told.err
    assert "warning: --folder chnages" in told.err
    assert ahead.sync("--dry-run", "--keep", "code.py").json["warnings"] == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_a_report_that_cannot_be_written_does_not_hide_what_was_done(ahead: Repo) -> None:
    told = ahead.sync("--land", "--report", "/dev/full")
    assert told.code == 0
    assert told.json["outcome"] == "synced"
    assert told.json["result"] == ahead.tip("beta")
    assert "--report /dev/full cannot be written" in told.err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_a_full_stdout_does_not_hide_what_was_done(ahead: Repo) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "--repo", str(ahead.path), "--canonical", "main", "--beta", "beta", "--land", "--json"],
            env=ahead.env, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert f"beta is now {ahead.tip('beta')[:12]}" in done.stderr
    assert "standard output: No space left" in done.stderr
