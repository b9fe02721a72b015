# SPDX-License-Identifier: Apache-2.0
"""Every counted prompt is cold: no salt is used twice, and a prompt that the cache answered is a fault."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from qualify.fake_server import FakeServer, serving

PREFILL = ["--only", "prefill", "--prefill-lengths", "2000", "--prefill-repeats", "4"]


def streams(server: FakeServer) -> list[dict[str, Any]]:
    return [body for _, body in server.seen.requests if body.get("stream")]


def counted(values: list[Any]) -> Counter[str]:
    return Counter(json.dumps(value) for value in values)


@pytest.mark.parametrize("cache", ["salt", "prompt"])
def test_a_resumed_run_measures_no_cached_prompt(qualify, cache):
    """With a server whose cache knows the salts, and with one that takes salts and does not mind them."""
    with serving(prefix_cache=cache, prefill_tok_s=10_000) as server:
        server.script.terminate = {3, 5, 9}  # counted, a warm-up, counted
        for _ in range(3):
            assert qualify("run", server.url, *PREFILL).code == 130
        done = qualify("run", server.url, *PREFILL)
        assert done.result["status"] == "complete"
        assert server.seen.cached == 0
        sent = streams(server)
    assert set(counted([body["cache_salt"] for body in sent]).values()) == {1}
    assert set(counted([body["prompt"] for body in sent]).values()) == {1}
    samples = done.result["blocks"][0]["prefill"]
    assert len(samples) == 4
    assert all(sample["tok_s"] < 11_000 for sample in samples)
    assert done.faults() == {}


def test_decode_salts_are_unique_over_resumes(qualify):
    options = ["--only", "decode", "--decode-max-tokens", "20"]
    with serving() as server:
        stopped = qualify("run", server.url, *options, "--max-requests", "8")
        assert stopped.result["status"] == "partial"
        qualify("run", server.url, *options)
        salts = counted([body["cache_salt"] for body in streams(server)])
    assert set(salts.values()) == {1}


def test_a_prompt_from_the_cache_is_a_fault_by_the_servers_counter(qualify):
    with serving(cached_share=0.5) as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert set(done.faults()) == {"cached"}
    assert "32 of 64 prompt tokens" in done.stops()["prefill 64"]
    assert done.line("prefill.64")["verdict"] == "missing"


def test_less_than_a_block_is_no_hit(qualify):
    with serving(cached_share=0.2) as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert done.faults() == {}


@pytest.mark.parametrize(
    "other", [{"foreign_running": 1}, {"foreign_waiting": 2}, {"foreign_prompt": 100}]
)
def test_another_clients_cached_prompt_is_not_ours(qualify, other):
    """The counter is the server's, so it proves nothing with others there; that is what the sample then says."""
    with serving(cached_share=0.5, **other) as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert done.faults() == {}
    assert [sample["busy"] for sample in done.result["blocks"][0]["prefill"]] == [True, True]
    assert "other requests in 2 of 2" in done.line("prefill.64")["note"]


def test_another_client_that_comes_during_a_request_is_seen(qualify):
    with serving(foreign_running=2, foreign_from=2) as server:
        done = qualify("run", server.url, "--only", "prefill", "--prefill-repeats", "1")
    assert [sample["busy"] for sample in done.result["blocks"][0]["prefill"]] == [True]


def test_an_idle_server_is_not_busy(qualify):
    with serving() as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert [sample["busy"] for sample in done.result["blocks"][0]["prefill"]] == [False, False]
    assert done.line("prefill.64")["note"] is None


def test_both_arms_see_equal_prompts_and_each_server_none_twice(qualify):
    with serving() as a, serving() as b:
        qualify("ab", a.url, b.url, "--only", "prefill", "--prefill-warmups", "0")
        seen = [[body["prompt"] for body in streams(server)] for server in (a, b)]
    assert counted(seen[0]) == counted(seen[1])
    assert set(counted(seen[0]).values()) == {1}
    assert len(seen[0]) == 4


def test_without_salts_no_prompt_is_sent_twice(qualify):
    with serving(extras=False) as a, serving(extras=False) as b:
        qualify("ab", a.url, b.url, "--only", "prefill")
        sent = list(itertools.chain(streams(a), streams(b)))
    assert len(sent) == 12
    assert set(counted([body["prompt"] for body in sent]).values()) == {1}
