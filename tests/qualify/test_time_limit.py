# SPDX-License-Identifier: Apache-2.0
"""--max-minutes bounds every wait of a run, which leaves a valid partial result; nothing else stops these runs early."""

from __future__ import annotations

import socket

import pytest
from qualify.fake_server import serving

LIMIT = ["--max-minutes", "0.05"]
PATIENT = ["--stall-timeout", "30", "--request-timeout", "30"]


def check(done):
    """Stopped by the limit, and by nothing that comes later."""
    assert done.code == 1, done.err
    assert done.result["status"] == "partial"
    assert "limit of 0.05 minutes is reached (--max-minutes)" in done.result["stop"]
    assert "--max-minutes" in done.err
    assert "continue with" in done.err
    assert done.result["verdict"] in ("incomplete", "fail")
    assert "incomplete" in (done.folder / "report.md").read_text().lower()
    assert done.faults() == {}


def test_it_ends_a_window(qualify):
    with serving() as server:
        done = qualify(
            "run",
            server.url,
            "--only",
            "decode",
            "--decode-windows",
            "1",
            "--decode-window",
            "30",
            *LIMIT,
        )
    check(done)
    assert done.result["blocks"][0]["decode"] == []


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_it_ends_a_request(qualify, part):
    with serving(fault="stall") as server:
        done = qualify("run", server.url, "--only", part, "--decode-window", "30", *PATIENT, *LIMIT)
    check(done)


def test_it_ends_a_pause(qualify):
    with serving() as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--prefill-repeats", "1", "--rounds", "2", "--cooldown", "30", *LIMIT,
        )  # fmt: skip
    check(done)
    assert [block["done"] for block in done.result["blocks"]] == [True, False]
    assert len(done.result["blocks"][0]["prefill"]) == 1


def test_it_ends_the_wait_for_a_restarted_server(qualify):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", "sleep 1000", "--env-b", "X=1", "--restart-timeout", "30", *LIMIT,
    )  # fmt: skip
    check(done)


def test_a_run_that_it_stopped_is_resumed(qualify):
    options = ["--only", "prefill,decode", "--decode-window", "2"]
    with serving() as server:
        stopped = qualify("run", server.url, *options, *LIMIT)
        check(stopped)
        done = qualify("run", server.url, *options)
    assert done.result["status"] == "complete"
    assert done.code == 0, done.err
    kept = stopped.result["blocks"][0]["prefill"]
    assert kept
    assert done.result["blocks"][0]["prefill"] == kept
