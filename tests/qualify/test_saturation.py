# SPDX-License-Identifier: Apache-2.0
"""A decode window counts only if all streams ran in it, by the server's gauges or by the streams themselves."""

from __future__ import annotations

import pytest
from b12x_overlay.qualify import decode
from qualify.fake_server import serving

DECODE = ["--only", "decode", "--stall-timeout", "60", "--request-timeout", "100"]


@pytest.fixture(autouse=True)
def _no_long_drain(monkeypatch):
    """Another client's requests, by the gauges, never end."""
    monkeypatch.setattr(decode, "_DRAIN_SECONDS", 0.3)


@pytest.mark.parametrize("metrics", [True, False])
def test_short_answers_do_not_hide_the_servers_limit(qualify, metrics):
    """The streams take turns, so that each of them gets tokens in every window."""
    with serving(max_streams=2, metrics=metrics) as server:
        done = qualify(
            "run", server.url, *DECODE, "--decode-concurrency", "4", "--decode-max-tokens", "20", "--decode-ramp", "2",
        )  # fmt: skip
    assert set(done.faults()) == {"not_saturated"}
    assert " of 4 streams ran at once" in done.stops()["decode C4"]
    assert done.line("decode.4.tok_s")["verdict"] == "missing"


@pytest.mark.parametrize("metrics", [True, False])
def test_a_limit_that_comes_later_is_seen_in_the_window(qualify, metrics):
    with serving(max_streams=4, lost_slots=2, metrics=metrics) as server:
        done = qualify(
            "run", server.url, *DECODE, "--decode-concurrency", "4", "--decode-max-tokens", "40", "--decode-ramp", "2",
            "--decode-settle", "1", "--decode-window", "0.8",
        )  # fmt: skip
    assert set(done.faults()) == {"not_saturated"}
    assert done.result["blocks"][0]["decode"] == []
    examples = [fault["example"] for fault in done.result["blocks"][0]["faults"]]
    assert "at the window's end" in examples[0]


@pytest.mark.parametrize(
    ("gauges", "seen"),
    [
        ({"foreign_waiting": 1}, "2 requests ran and 1 waited"),
        ({"foreign_running": -1}, "1 requests ran and 0 waited"),
    ],
)
def test_the_servers_gauges_decide_over_the_streams(qualify, gauges, seen):
    with serving(**gauges) as server:
        done = qualify("run", server.url, *DECODE, "--decode-max-tokens", "4000")
    assert set(done.faults()) == {"not_saturated"}
    assert seen in done.stops()["decode C2"]


def test_short_answers_of_a_sound_server_are_saturated(qualify):
    """A look that falls between two answers shows no limit: it is repeated. Here most looks do."""
    with serving(metrics=False, prefill_tok_s=1000) as server:
        done = qualify(
            "run", server.url, *DECODE, "--decode-max-tokens", "8", "--decode-windows", "6"
        )
    assert done.faults() == {}
    assert len(done.result["blocks"][0]["decode"]) == 6
    assert all(sample["answers_restarted"] for sample in done.result["blocks"][0]["decode"])


def test_a_stream_without_a_token_in_the_window(qualify):
    """It runs by the gauges, and is silent for less than --stall-timeout."""
    with serving(fault="silent", faulty={1}) as server:
        done = qualify(
            "run", server.url, *DECODE, "--decode-max-tokens", "4000", "--decode-settle", "0.5"
        )
    assert set(done.faults()) == {"not_saturated"}
    assert "1 of 2 streams got no token" in done.stops()["decode C2"]


def test_another_clients_running_request_is_noticed(qualify):
    """By the gauge alone: it gets no token, so that the counters agree."""
    with serving(foreign_running=1) as server:
        done = qualify("run", server.url, *DECODE, "--decode-max-tokens", "4000")
    assert set(done.faults()) == {"not_saturated"}
    assert "3 requests ran on the server, 2 of them ours" in done.stops()["decode C2"]
