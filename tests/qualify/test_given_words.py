# SPDX-License-Identifier: Apache-2.0
"""Words given on the command line: what of them gets into files that are passed on."""

from __future__ import annotations

import shlex
import sys

import pytest
from b12x_overlay.qualify.variables import RECORDED, clean
from qualify.fake_server import serving
from qualify.test_ab import FAKE, free_port

FILES = ("result.json", "report.md", "report.html")
PRIVATE = {
    "VLLM_API_KEY": "sesame-open-2041",
    "VLLM_HOST_IP": "192.0.2.77",
    "MASTER_ADDR": "rack7-node3.lab",
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "USER": "marguerite",
    "SHORT": "qzx",
}


@pytest.mark.parametrize("name", PRIVATE)
def test_the_value_of_a_variable_that_is_not_recorded_is_hidden(name):
    assert clean({name: PRIVATE[name]}) == {name: "<set>"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_variable_keeps_a_plain_value_only(name):
    assert clean({name: "1536"}) == {name: "1536"}
    assert clean({name: "/home/bob/x"}) == {name: "<set>"}
    assert "192.0.2.77" not in clean({name: "192.0.2.77"})[name]


def test_variables_of_a_restart_are_named_and_not_told(qualify):
    port = free_port()
    command = shlex.join([sys.executable, str(FAKE), str(port)])
    given = [item for name, value in PRIVATE.items() for item in ("--env-b", f"{name}={value}")]
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", command, *given,
        "--env-b", "VLLM_B12X_A4_KEEP_PACKED=1", "--only", "prefill", "--restart-timeout", "30",
    )  # fmt: skip
    assert done.result["status"] == "complete", done.err
    assert done.result["arms"][1]["restart_environment"] == dict.fromkeys(PRIVATE, "<set>") | {
        "VLLM_B12X_A4_KEEP_PACKED": "1"
    }
    for name in FILES:
        text = (done.folder / name).read_text()
        assert "VLLM_HOST_IP" in text.replace("\\", "")
        assert [value for value in PRIVATE.values() if value in text] == []


def test_a_server_that_repeats_a_hidden_value_does_not_publish_it(qualify):
    """The fault's example is the server's own text; it names the key that the restart gave it."""
    port = free_port()
    command = shlex.join([sys.executable, str(FAKE), str(port)])
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", command, "--env-b", "FAKE_REFUSES=sesame-open-2041",
        "--only", "prefill", "--restart-timeout", "30",
    )  # fmt: skip
    text = (done.folder / "result.json").read_text()
    assert "refused for <set>" in text, done.err
    for name in FILES:
        assert "sesame" not in (done.folder / name).read_text()


def test_labels_are_redacted(qualify):
    with serving() as a, serving() as b:
        done = qualify(
            "ab", a.url, b.url, "--only", "prefill", "--label-a", "old at /srv/models/bob",
            "--label-b", "new with sk-abcdefghijkl0123 on 192.0.2.77",
        )  # fmt: skip
    assert [arm["label"] for arm in done.result["arms"]] == [
        "old at <path>",
        "new with <key> on <address>",
    ]
