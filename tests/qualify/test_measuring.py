# SPDX-License-Identifier: Apache-2.0
"""The figures are those of the server: what is counted, from when to when, and divided by what.

Speeds are those the scripted server is told, with margins for a busy machine that are narrower than the error looked for.
"""

from __future__ import annotations

from itertools import pairwise

from qualify.fake_server import serving


def test_prefill_is_over_the_time_to_the_first_token(qualify):
    """The rest of the answer takes four times as long as its prompt."""
    with serving(prefill_tok_s=4000, decode_tok_s=4) as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--prefill-lengths", "2000", "--prefill-repeats", "1",
            "--stall-timeout", "30", "--request-timeout", "60",
        )  # fmt: skip
    (sample,) = done.result["blocks"][0]["prefill"]
    assert 2000 < sample["tok_s"] <= 4000
    assert sample["tok_s"] * sample["ttft_s"] / 2000 > 0.999


def test_warm_ups_are_not_counted(qualify):
    """The first prompt takes ten times as long, 2 s."""
    with serving(prefill_tok_s=10_000, first_slow=10) as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--prefill-lengths", "2000", "--stall-timeout", "30",
        )  # fmt: skip
    assert done.faults() == {}
    samples = done.result["blocks"][0]["prefill"]
    assert len(samples) == 2
    assert all(sample["tok_s"] > 2500 for sample in samples)


def test_windows_begin_after_the_settling_time(qualify):
    """Up to 1.5 s after the first stream's start answers come at a twentieth of the speed."""
    with serving(decode_tok_s=200, slow_until=1.5) as server:
        done = qualify(
            "run", server.url, "--only", "decode", "--decode-windows", "1", "--decode-window", "0.5",
            "--decode-settle", "2", "--decode-max-tokens", "4000",
        )  # fmt: skip
    (sample,) = done.result["blocks"][0]["decode"]
    assert sample["tok_s"] > 400 / 3


def test_a_measurement_begins_when_the_server_has_dropped_the_last_ones_streams(qualify):
    with serving(linger=0.7) as server:
        done = qualify(
            "run", server.url, "--only", "decode", "--decode-concurrency", "2,1", "--decode-windows", "1",
            "--decode-max-tokens", "4000",
        )  # fmt: skip
        assert set(server.seen.lingering_at_start) == {0}
        assert len(server.seen.lingering_at_start) == 3
    assert done.faults() == {}


def test_accepted_tokens_are_per_step_and_stream_and_per_draft(qualify):
    """Every other step drafts two tokens, which are accepted: 3 tokens, then 1."""
    with serving(accepted=2, draft_every=2) as server:
        done = qualify(
            "run", server.url, "--only", "decode", "--decode-concurrency", "4", "--decode-max-tokens", "4000",
            "--decode-window", "1",
        )  # fmt: skip
    for sample in done.result["blocks"][0]["decode"]:
        assert 1.7 < sample["accepted_per_step"] < 2.4
        assert 2.7 < sample["accepted_per_draft"] < 3.3
        product = sample["steps_s"] * sample["concurrency"] * sample["accepted_per_step"]
        assert 0.6 < product / sample["tok_s"] < 1.7


def test_the_pause_between_blocks_is_kept(qualify):
    with serving() as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--prefill-repeats", "1", "--prefill-warmups", "0",
            "--rounds", "3", "--cooldown", "1.2",
        )  # fmt: skip
        starts = server.seen.started_at
    assert done.result["status"] == "complete"
    assert len(starts) == 3
    assert all(after - before >= 1.2 for before, after in pairwise(starts))
