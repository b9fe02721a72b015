# SPDX-License-Identifier: Apache-2.0
"""The degeneration guard in prefill and decode: what it finds, and what is too short to say."""

from __future__ import annotations

import pytest
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
