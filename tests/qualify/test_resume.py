# SPDX-License-Identifier: Apache-2.0
"""Interrupted, killed and limited runs leave a valid partial result that the same command resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from b12x_overlay.paths import REPO
from b12x_overlay.qualify.cli import main
from qualify.conftest import SMALL
from qualify.fake_server import FakeServer, serving

LONG = [
    *SMALL, "--prefill-repeats", "15", "--prefill-lengths", "2000", "--decode-windows", "4",
    "--needle-requests", "300",
]  # fmt: skip


def start(url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    code = (
        "import signal, sys; from b12x_overlay.qualify.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where pytest runs in the background
        "sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO / "scripts")}
    return subprocess.Popen(
        [sys.executable, "-c", code, "run", url, *LONG, *more, "--out", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def wait_for(folder: Path, what) -> dict:
    """The result as soon as it satisfies *what*; every state that is seen on the way must be valid JSON."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        path = folder / "result.json"
        if path.exists():
            result = json.loads(path.read_text())
            if what(result["blocks"][0]):
                return result
        time.sleep(0.05)
    raise AssertionError("never got there")


STAGES = {
    "prefill": lambda block: len(block["prefill"]) >= 2,
    "decode": lambda block: len(block["decode"]) >= 1,
    "needle": lambda block: block["needle"] and len(block["needle"][0]["answers"]) >= 5,
}


@pytest.mark.parametrize(
    ("stage", "number", "code"),
    [
        ("prefill", signal.SIGINT, 130),
        ("decode", signal.SIGTERM, 130),
        ("needle", signal.SIGINT, 130),
        ("needle", signal.SIGKILL, -9),
    ],
)
def test_a_stopped_run_is_resumed(qualify, tmp_path, stage, number, code):
    folder = tmp_path / "result"
    with serving(prefill_tok_s=20_000) as server:
        process = start(server.url, folder)
        wait_for(folder, STAGES[stage])
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert process.returncode == code, err
        before = json.loads((folder / "result.json").read_text())
        assert before["status"] == "partial"
        if code == 130:
            assert "--out" in err
            assert before["stop"] == "interrupted"
            assert "incomplete" in (folder / "report.md").read_text().lower()
        sent = len(server.seen.requests)
        done = qualify("run", server.url, *LONG[len(SMALL) :])
        resent = len(server.seen.requests) - sent
    assert done.result["status"] == "complete", done.err
    block, old = done.result["blocks"][0], before["blocks"][0]
    assert done.result["run_id"] == before["run_id"]
    # Nothing that was measured is measured again or lost.
    assert block["prefill"][: len(old["prefill"])] == old["prefill"]
    assert block["decode"][: len(old["decode"])] == old["decode"]
    assert len(block["prefill"]) == 15
    assert len(block["decode"]) == 4
    answers = block["needle"][0]["answers"]
    assert [answer["index"] for answer in answers] == list(range(300))
    if stage == "needle":
        assert resent < 300
    assert done.faults() == {}


def test_a_complete_result_is_not_measured_again(qualify):
    with serving() as server:
        qualify("run", server.url, "--only", "prefill")
        sent = len(server.seen.requests)
        again = qualify("run", server.url, "--only", "prefill")
        assert len(server.seen.requests) == sent
    assert again.code == 0
    assert "complete" in again.err


def test_another_plan_is_refused_and_the_difference_named(qualify):
    with serving() as server:
        qualify("run", server.url, "--only", "prefill")
        before = (
            qualify("run", server.url, "--only", "prefill").folder / "result.json"
        ).read_bytes()
        other = qualify("run", server.url, "--only", "prefill", "--prefill-repeats", "3")
    assert other.code == 3
    assert "prefill.repeats: 2 there, 3 asked" in other.err
    assert (other.folder / "result.json").read_bytes() == before


def test_another_server_is_refused(qualify):
    with serving() as server:
        stopped = qualify("run", server.url, "--max-requests", "6")
    assert stopped.result["status"] == "partial"
    with serving(version="0.34.0") as server:
        done = qualify("run", server.url)
    assert done.code == 3
    assert "0.33.0" in done.err
    assert "0.34.0" in done.err
    assert "another --out" in done.err
    assert "continue with" not in done.err


def test_the_request_limit_stops_the_run(qualify):
    with serving() as server:
        done = qualify("run", server.url, "--max-requests", "10")
        assert len(server.seen.requests) <= 10
        assert done.code == 1
        assert "limit of 10 requests" in done.result["stop"]
        assert done.result["verdict"] == "incomplete"
        done = qualify("run", server.url)
    assert done.result["status"] == "complete"


def test_the_time_limit_stops_the_run(qualify):
    with serving() as server:
        done = qualify("run", server.url, "--max-minutes", "0.01", "--needle-requests", "100000")
    assert done.code == 1
    assert "minutes" in done.result["stop"]


@pytest.mark.parametrize("stage", ["prefill", "needle"])
def test_a_server_that_dies_leaves_a_partial_result_that_is_resumed(qualify, tmp_path, stage):
    folder = tmp_path / "result"
    with serving(prefill_tok_s=20_000) as server:
        process = start(server.url, folder)
        wait_for(folder, STAGES[stage])
        port = server.port
    _, err = process.communicate(timeout=60)
    result = json.loads((folder / "result.json").read_text())
    assert process.returncode == 4, err
    assert result["status"] == "partial"
    assert "does not answer any more" in result["stop"]
    assert not result["blocks"][0]["stopped"]
    lost = {fault["kind"] for fault in result["blocks"][0]["faults"]}
    assert lost & {"connect", "disconnect"}
    with FakeServer(port=port) as server:
        done = qualify("run", server.url, *LONG[len(SMALL) :])
    assert done.result["status"] == "complete", done.err
    assert len(done.result["blocks"][0]["prefill"]) == 15
    answers = done.result["blocks"][0]["needle"][0]["answers"]
    assert [answer["outcome"] for answer in answers] == ["EXACT"] * 300
    # The loss is not forgotten.
    assert done.line("guard.faults")["verdict"] == "fail"


def test_two_runs_do_not_share_a_folder(qualify, tmp_path):
    folder = tmp_path / "result"
    with serving(prefill_tok_s=20_000) as server:
        process = start(server.url, folder)
        wait_for(folder, STAGES["prefill"])
        second = qualify("run", server.url)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert second.code == 4
    assert "another run" in second.err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_id": "other"}', "\0\0"])
def test_a_foreign_result_file_is_left_alone(tmp_path, content, capsys):
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "result.json").write_text(content)
    with serving() as server:
        code = main(["run", server.url, "--out", str(folder)])
        assert server.seen.paths == []
    assert code == 3
    assert "is no result of scripts/qualify" in capsys.readouterr().err
    assert (folder / "result.json").read_text() == content


def test_a_folder_of_other_files_is_left_alone(qualify, tmp_path):
    folder = tmp_path / "result"
    folder.mkdir()
    (folder / "mine.txt").write_text("x")
    with serving() as server:
        done = qualify("run", server.url)
        assert server.seen.paths == []
    assert done.code == 3
    assert "mine.txt" in done.err
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_an_empty_folder_that_the_user_made_stays(qualify, tmp_path):
    (tmp_path / "result").mkdir()
    with serving(models=[]) as server:
        assert qualify("run", server.url).code == 4
    assert list((tmp_path / "result").iterdir()) == []


@pytest.mark.parametrize("name", ["nowhere", "other.json"])
def test_what_is_no_result_is_wrong_usage(qualify, tmp_path, name):
    (tmp_path / "other.json").write_text('{"x": "' + "y" * 10_000 + '"}')
    for command in (("report", str(tmp_path / name)), ("compare", *[str(tmp_path / name)] * 2)):
        done = qualify(*command, out="both")
        assert done.code == 2
        assert name in done.err
        assert len(done.err) < 1000
        assert not done.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk(qualify, tmp_path):
    """The last whole result stays; nothing is left half written."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", small], check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount")
    try:
        with serving() as server:
            done = qualify("run", server.url, "--needle-requests", "400", out="small/result")
        assert done.code == 4
        assert "No space left" in done.err
        assert done.result["status"] in ("partial", "complete")
        assert not list((small / "result").glob(".result.json.*"))
    finally:
        subprocess.run(["umount", small], check=True)
