# SPDX-License-Identifier: Apache-2.0
"""Loops are found and nothing else; hosts, paths, keys and names do not get through."""

from __future__ import annotations

import random

import pytest
from b12x_overlay.qualify.address import Address
from b12x_overlay.qualify.degeneration import loop_length
from b12x_overlay.qualify.errors import UsageError
from b12x_overlay.qualify.prompts import filler, story
from b12x_overlay.qualify.redact import model_name, redact
from b12x_overlay.qualify.settings import GuardThresholds
from hypothesis import given, settings
from hypothesis import strategies as st

GUARD = GuardThresholds()


@settings(deadline=None)
@given(st.text(min_size=1, max_size=100), st.text(max_size=50))
def test_a_cycle_at_the_end_is_found(cycle, start):
    text = start + cycle * (600 // len(cycle) + 5)
    found = loop_length(text, GUARD)
    assert found is not None
    assert found <= len(cycle)
    assert text[-found:] == text[-2 * found : -found]


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_text_of_different_words_is_no_loop(seed):
    text = filler(str(seed), 400)
    assert loop_length(text, GUARD) is None


def test_a_loop_earlier_in_the_text_that_ended_is_no_loop():
    rng = random.Random(1)
    tail = "".join(rng.choices("abcdefgh ", k=400))
    assert loop_length("no " * 500 + tail, GUARD) is None


def test_fewer_cycles_or_characters_than_the_limits_are_no_loop():
    cycle = filler("x", 60)
    assert loop_length("start " + cycle * 3, GUARD) is None
    assert loop_length("a" * 511, GUARD) is None
    assert loop_length("a" * 512, GUARD) == 1


def test_prompts_differ_from_the_first_word_and_repeat_for_the_same_key():
    starts = {filler(f"key {number}", 50)[:20] for number in range(500)}
    assert len(starts) == 500
    assert filler("k", 50) == filler("k", 50)
    assert story("k") == story("k")


@pytest.mark.parametrize(
    ("text", "gone", "kept"),
    [
        ("no file /home/bob/models/x.safetensors here", "bob", "no file"),
        ("see http://gpu-box.lan:8000/v1 now", "gpu-box", "see"),
        ("connect to 10.1.2.3:8000 failed", "10.1.2.3", "failed"),
        ("key sk-abcdefghijkl0123 is wrong", "abcdefghijkl", "is wrong"),
        ("Authorization: Bearer abc.def", "abc.def", "Authorization"),
        ("HF_TOKEN=hf_abcdefghijklmnop set", "abcdefgh", "set"),
        ("api_key: topsecretvalue", "topsecret", "api_key"),
        ("ask bob@example.org about it", "bob", "about it"),
        ("~/models/x is missing", "models/x", "is missing"),
        (r"C:\Users\bob\x is missing", "bob", "is missing"),
        ("localhost:8000 refused", "8000", "refused"),
    ],
)
def test_redact(text, gone, kept):
    assert gone not in redact(text)
    assert kept in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=4096 is too large",
        "HTTP 500: out of memory",
        "7,490 tok/s",
        "0.33.0+cu129",
        "tokens: many",
        "org/model",
    ],
)
def test_redact_leaves_plain_text_alone(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("zai-org/GLM-5.3-Flash", "zai-org/GLM-5.3-Flash"),
        ("GLM", "GLM"),
        ("/home/bob/models/GLM-5.3", "GLM-5.3"),
        ("/home/bob/models/GLM-5.3/", "GLM-5.3"),
        ("./models/x", "x"),
        ("/root/.cache/huggingface/hub/models--org--m/snapshots/0123abc", "org/m"),
        (r"C:\models\x", "x"),
        ("~/x", "x"),
    ],
)
def test_model_name(name, shown):
    assert model_name(name) == shown


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("http://h:8000", "http://h:8000/"),
        (" http://h:8000/v1 ", "http://h:8000/"),
        ("https://h/proxy/v1/", "https://h/proxy"),
        ("http://[::1]:8000", "http://[::1]:8000/"),
    ],
)
def test_address(text, base):
    address = Address.parse(text)
    assert str(address.base) == base
    assert str(address.url("/v1/models")) == base.rstrip("/") + "/v1/models"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1:8000", "write http://127.0.0.1:8000"),
        ("", "write http://"),
        ("ftp://h", "not supported"),
        ("http://", "names no host"),
        ("http://h:99999", "no port"),
        ("http://h:0", "no port"),
        ("http://bob:secret@h:1", "api-key-env"),
        ("http://h/v1/chat/completions", "base address"),
        ("http://h/?key=1", "leave '?"),
        ("http://h h/", "no address"),
    ],
)
def test_a_wrong_address_says_what_to_write(text, message):
    with pytest.raises(UsageError) as error:
        Address.parse(text)
    assert message in str(error.value)
    assert "secret" not in str(error.value)
