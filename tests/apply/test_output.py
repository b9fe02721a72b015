# SPDX-License-Identifier: Apache-2.0
"""Readers that go away, closed descriptors, a full disk and poor encodings: none of them decides what a run does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from apply.factory import PYTHON, REPO, Project, Series, contents


@pytest.fixture
def gone() -> Iterator[int]:
    """A pipe whose reader has gone, as after ``| head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run(made: Project, *args: str | Path, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": made.env, **kwargs}
    return subprocess.run([PYTHON, str(made.command), *map(str, args)], check=False, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_exit_code_is_the_verdict_although_nobody_reads(
    made: Project, site: Path, gone: int, flags: tuple[str, ...]
) -> None:
    """``status | grep -q`` under pipefail must not call a stock vLLM patched."""
    command = ("status", "--target", site, *flags)
    done = run(made, *command, stdout=gone)
    assert (done.returncode, b"Traceback" in done.stderr) == (1, False)
    assert run(made, *command, stdout=gone, stderr=gone).returncode == 1
    assert made.run("--target", site).code == 0
    assert run(made, *command, stdout=gone).returncode == 0


def test_the_work_is_done_although_nobody_reads_the_progress(
    made: Project, series: Series, site: Path, gone: int
) -> None:
    done = run(made, "--target", site, "-v", stdout=gone, stderr=gone)
    assert done.returncode == 0
    found = contents(site)
    assert {path: found[path] for path in series.final()} == series.final()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_result_that_cannot_be_written_is_an_error(
    made: Project, site: Path, flags: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(made, "status", "--target", site, *flags, stdout=full)
        assert done.returncode == 4
        assert b"error: standard output: No space left on device" in done.stderr
        assert b"Traceback" not in done.stderr
        assert run(made, "--target", site, stderr=full).returncode == 0  # only words were lost


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("flags", ["", "--json"])
def test_closed_descriptors(made: Project, site: Path, closing: str, flags: str) -> None:
    line = f'"$0" "$1" status --target "$2" {flags} {closing}'
    done = subprocess.run(
        ["sh", "-c", line, PYTHON, str(made.command), str(site)],
        capture_output=True, env=made.env, check=False,
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (1, False)


@pytest.mark.parametrize(
    "words",
    [
        ("apply-patches", "--nonsense", "--json"),
        ("apply-patches", "revert", "--commit", "--json"),  # found after parsing
        ("doctor", "--color", "red", "--json"),
        ("build-image", "--json", "--nonsense"),
        ("changes", "nonsense", "--json"),
        ("changes", "new", "--json", "--nonsense"),
        ("sync-beta", "--json", "--land", "--push"),
        ("convert-csf", "--json"),
        ("qualify", "run", "--json"),
    ],
    ids=" ".join,
)
def test_a_usage_error_is_json_too(words: tuple[str, ...]) -> None:
    command = [PYTHON, str(REPO / "scripts" / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["reason"], error["next"][-7:]) == ("usage", " --help")
    assert f"error: {error['message']}" in done.stderr
    plain = [word for word in command if word != "--json"]
    done = subprocess.run(plain, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("name", ["apply-patches", "doctor", "build-image"])
def test_ctrl_c_while_modules_are_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [PYTHON, str(REPO / "scripts" / name)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, b"")


def test_an_encoding_without_the_paths_letters(made: Project, site: Path, tmp_path: Path) -> None:
    other = tmp_path / "päth 日本"
    shutil.copytree(site, other)
    env = {**made.env, "PYTHONIOENCODING": "ascii"}
    done = run(made, "--target", other, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"p\\xe4th \\u65e5\\u672c" in done.stdout
