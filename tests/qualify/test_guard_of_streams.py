# SPDX-License-Identifier: Apache-2.0
"""The degeneration guard in prefill and decode: what it finds, and what is too short to say."""

from __future__ import annotations

import pytest
from b12x_overlay.qualify.degeneration import check_answers
from b12x_overlay.qualify.faults import Fault
from b12x_overlay.qualify.settings import GuardThresholds
from qualify.fake_server import serving

LONG = ["--only", "decode", "--decode-max-tokens", "4000"]


@pytest.mark.parametrize("fault", ["empty", "blank"])
def test_an_answer_that_is_cut_off_without_text_is_empty(qualify, fault):
    with serving(fault=fault) as server:
        done = qualify("run", server.url, *LONG)
    assert done.faults() == {"empty": 2}
    assert done.line("guard.degenerate")["verdict"] == "fail"


def test_a_loop_is_found_in_an_answer_that_is_cut_off(qualify):
    with serving(fault="repetition") as server:
        done = qualify("run", server.url, *LONG)
    assert done.faults() == {"repetition": 2}


def test_text_that_is_held_back_for_a_few_tokens_is_not_empty(qualify):
    """The streams are cut at about 10 tokens, before their first text."""
    with serving(fault="late_text", decode_tok_s=10) as server:
        done = qualify("run", server.url, *LONG)
    assert done.faults() == {}


@pytest.mark.parametrize(
    ("fault", "kind"), [("empty", "empty"), ("blank", "empty"), ("repetition", "repetition")]
)
def test_prefill_answers_that_are_all_degenerate_fail_the_run(qualify, fault, kind):
    """Each has 8 tokens; they are judged together, once per length."""
    with serving(fault=fault) as server:
        done = qualify("run", server.url, "--only", "prefill", "--prefill-lengths", "64,128")
    assert done.faults() == {kind: 2}
    assert "3 answers of 24 tokens" in done.result["blocks"][0]["faults"][0]["example"]
    assert len(done.result["blocks"][0]["prefill"]) == 4  # the speed is an honest one
    assert done.line("guard.degenerate")["verdict"] == "fail"
    assert done.code == 1


def test_one_short_prefill_answer_without_text_says_nothing(qualify):
    with serving(fault="empty") as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--prefill-repeats", "1", "--prefill-warmups", "0",
        )  # fmt: skip
    assert done.faults() == {}


def test_prefill_answers_of_a_stopped_run_are_judged(qualify):
    with serving(fault="empty") as server:
        done = qualify("run", server.url, "--only", "prefill", "--max-requests", "6")
    assert done.result["status"] == "partial"
    assert done.faults() == {"empty": 1}


@pytest.mark.parametrize(
    ("texts", "degenerate"),
    [
        (["!!!!!!!!", "????????"], True),
        (["!!!!!!!!", "", " \n"], True),
        ([" the the the the", "\nthethethethe"], True),
        (["!!!!!!!!", "a sound one"], False),
        (["the the the", "the the the"], False),
        (["1234123", "1234123"], False),
    ],
)
def test_only_what_repeats_in_every_answer_is_repetition(texts, degenerate):
    if degenerate:
        with pytest.raises(Fault, match="repetition"):
            check_answers(texts, 16, GuardThresholds())
    else:
        check_answers(texts, 16, GuardThresholds())
