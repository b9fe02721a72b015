# SPDX-License-Identifier: Apache-2.0
"""Each fault of a server is reported as what it is, and never as a figure."""

from __future__ import annotations

import socket

import pytest
from qualify.fake_server import serving

STREAM_FAULTS = {
    "stall": "stall",
    "broken_chunk": "broken_chunk",
    "odd_chunk": "broken_chunk",
    "error_event": "http_5xx",
    "disconnect": "disconnect",
    "no_end": "disconnect",
    "http_429": "http_429",
    "http_500": "http_5xx",
    "html_500": "http_5xx",
    "http_400": "http_4xx",
    "redirect": "redirect",
    "not_a_stream": "not_a_stream",
    "no_usage": "no_usage",
    "usage_text": "wrong_usage",
    "usage_too_many": "wrong_usage",
}
PREFILL_FAULTS = STREAM_FAULTS | {
    "usage_prompt": "wrong_usage",
    "cached": "cached",
    "early_end": "truncated",
}
DECODE_FAULTS = STREAM_FAULTS | {
    "usage_back": "wrong_usage",
    "empty": "empty",
    "repetition": "repetition",
    "early_end": "truncated",
}


def test_a_sound_server_passes(qualify):
    with serving() as server:
        done = qualify("run", server.url, "--needle-requests", "150")
    assert done.code == 0, done.err
    assert done.result["verdict"] == "pass"
    assert done.faults() == {}
    assert done.stops() == {}
    assert done.line("needle.exact")["value"] == 1.0


@pytest.mark.parametrize(("fault", "kind"), PREFILL_FAULTS.items())
def test_prefill_names_the_fault(qualify, fault, kind):
    with serving(fault=fault) as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert done.code == 1
    assert set(done.faults()) == {kind}
    assert "prefill 64" in done.stops()
    assert kind in done.stops()["prefill 64"]
    assert done.line("prefill.64")["verdict"] == "missing"
    assert done.result["verdict"] == "fail"


@pytest.mark.parametrize(("fault", "kind"), DECODE_FAULTS.items())
def test_decode_names_the_fault(qualify, fault, kind):
    with serving(fault=fault) as server:
        done = qualify(
            "run",
            server.url,
            "--only",
            "decode",
            "--decode-max-tokens",
            "80",
            "--decode-window",
            "1",
        )
    assert done.code == 1
    assert kind in done.faults()
    # A window in which streams broke does not count; beside the fault itself only that is said.
    assert set(done.faults()) <= {kind, "not_saturated"}
    assert done.result["verdict"] == "fail"


def test_understated_usage_contradicts_the_servers_counter(qualify):
    with serving(fault="usage_half") as server:
        done = qualify("run", server.url, "--only", "decode", "--decode-max-tokens", "4000")
    assert set(done.faults()) == {"wrong_usage"}
    assert "the streams' usage says" in done.stops()["decode C2"]


def test_one_broken_request_is_counted_and_the_rest_is_measured(qualify):
    with serving(fault="http_500", faulty={1}) as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert done.faults() == {"http_5xx": 1}
    assert len(done.result["blocks"][0]["prefill"]) == 2
    assert done.line("guard.faults")["verdict"] == "fail"


def test_a_slow_stream_is_slow_and_no_fault(qualify):
    with serving(fault="slow") as server:
        done = qualify("run", server.url, "--only", "decode", "--decode-window", "0.5")
    assert done.faults() == {}
    samples = done.result["blocks"][0]["decode"]
    assert all(sample["longest_gap_s"] > 0.03 for sample in samples)
    assert all(sample["tok_s"] < 60 for sample in samples)


NEEDLE_OUTCOMES = {
    "near": "NEAR_MISS",
    "wrong_sum": "WRONG_SUM",
    "wrong_facts": "WRONG_FACTS",
    "two_calls": "FAIL",
    "prose": "FAIL",
    "beside": "FAIL",
    "malformed": "FAIL",
    "deep": "FAIL",
    "text_number": "FAIL",
    "extra": "FAIL",
    "other_tool": "FAIL",
    "empty": "FAIL",
    "loop": "FAIL",
    "trunc": "TRUNC",
    "http_429": "ERROR",
    "http_500": "ERROR",
    "disconnect": "ERROR",
    "broken_body": "ERROR",
    "usage_text": "ERROR",
}


@pytest.mark.parametrize(("kind", "outcome"), NEEDLE_OUTCOMES.items())
def test_needle_names_the_outcome(qualify, kind, outcome):
    with serving(needle=kind, faulty={2, 5}) as server:
        done = qualify("run", server.url, "--only", "needle", "--needle-concurrency", "1")
    answers = done.result["blocks"][0]["needle"][0]["answers"]
    assert [a["index"] for a in answers if a["outcome"] == outcome] == [2, 5]
    assert sum(a["outcome"] == "EXACT" for a in answers) == 10
    expected = {"empty": "empty", "loop": "repetition", "trunc": "truncated"}.get(kind)
    if expected:
        assert done.faults() == {expected: 2}
        assert done.line("guard.degenerate")["verdict"] == "fail"
    answered = 10 if outcome == "ERROR" else 12
    assert done.line("needle.exact")["note"] == f"per run: 10 of {answered}"


def test_a_dead_needle_server_is_given_up(qualify):
    with serving(needle="http_500") as server:
        done = qualify("run", server.url, "--only", "needle", "--needle-requests", "500")
    assert "needle run 1" in done.stops()
    assert len(done.result["blocks"][0]["needle"][0]["answers"]) < 20
    assert done.line("needle.exact")["verdict"] == "missing"


def test_no_metrics_leaves_steps_unknown(qualify):
    with serving(metrics=False) as server:
        done = qualify("run", server.url, "--only", "decode")
    assert done.code == 0
    assert done.result["arms"][0]["abilities"]["metrics"] is False
    assert all(sample["steps_s"] is None for sample in done.result["blocks"][0]["decode"])
    assert not any(line["id"].endswith("steps_s") for line in done.result["lines"])


def test_no_tokenizer_falls_back_to_usage_and_says_so(qualify):
    with serving(tokenizer=False) as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert {sample["counted_by"] for sample in done.result["blocks"][0]["prefill"]} == {"usage"}


def test_a_server_without_completions_is_measured_by_chat(qualify):
    with serving(completions=False) as server:
        done = qualify("run", server.url)
    assert done.code == 0, done.err
    assert done.result["blocks"][0]["prefill"][0]["prompt_tokens"] >= 64


def test_a_server_without_vllms_fields_has_no_token_count_while_streaming(qualify):
    with serving(extras=False) as server:
        done = qualify("run", server.url, "--only", "decode")
    assert done.result["arms"][0]["abilities"]["extras"] is False
    assert "no_usage" in done.faults()


def test_a_lying_tokenizer_is_not_used(qualify):
    with serving(fault="tokenizer_count") as server:
        done = qualify("run", server.url, "--only", "prefill")
    assert done.result["arms"][0]["abilities"]["tokenizer"] is False


def test_a_prompt_longer_than_the_context_is_not_sent(qualify):
    with serving(max_model_len=100) as server:
        done = qualify("run", server.url, "--only", "prefill", "--prefill-lengths", "64,4K")
    assert "context is 100 tokens" in done.stops()["prefill 4096"]
    assert done.line("prefill.64")["value"] is not None


def test_fewer_streams_than_asked_is_not_saturated(qualify):
    with serving(max_streams=2) as server:
        done = qualify(
            "run", server.url, "--only", "decode", "--decode-concurrency", "4", "--decode-max-tokens", "4000",
            "--stall-timeout", "30", "--decode-ramp", "1",
        )  # fmt: skip
    assert set(done.faults()) == {"not_saturated"}
    assert "2 of 4 streams" in done.stops()["decode C4"]


def test_other_clients_in_the_window_are_noticed(qualify):
    with serving(foreign_tokens_s=5000) as server:
        done = qualify("run", server.url, "--only", "decode")
    assert "other clients" in done.stops()["decode C2"]
    assert done.line("decode.2.tok_s")["verdict"] == "missing"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"fault": "models_html"}, "not JSON"),
        ({"fault": "models_deep"}, "not JSON"),
        ({"models": []}, "lists no model"),
        ({"models": ["a", "b"]}, "choose one with --model: a, b"),
        ({"key": "sk-secret-1234567890"}, "--api-key-env"),
    ],
)
def test_an_unusable_server_ends_the_run_with_a_reason(qualify, script, message):
    with serving(**script) as server:
        done = qualify("run", server.url)
    assert done.code == 4
    assert message in done.err
    assert not done.folder.exists()


def test_no_server_at_all(qualify):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = qualify("run", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert done.code == 4
    assert "Is it running" in done.err
