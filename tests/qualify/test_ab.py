# SPDX-License-Identifier: Apache-2.0
"""A/B of two servers, of one restarted server, and of two finished results."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest
from b12x_overlay.qualify import restart
from b12x_overlay.qualify.cli import main
from qualify.fake_server import serving

FAKE = Path(__file__).with_name("fake_server.py")
QUICK = ["--only", "decode", "--decode-windows", "1", "--decode-window", "0.4"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_servers_in_abba_order(qualify):
    with serving(decode_tok_s=400) as a, serving(decode_tok_s=40) as b:
        done = qualify(
            "ab", a.url, b.url, "--skip", "needle", "--label-a", "old", "--label-b", "new"
        )
    assert [block["arm"] for block in done.result["blocks"]] == ["A", "B", "B", "A"]
    started = [block["started"] for block in done.result["blocks"]]
    assert started == sorted(started)
    line = done.line("ab.decode.2.tok_s")
    assert line["value"] < 0.5  # a tenth, on a machine with nothing else to do
    assert line["low"] < line["value"] < line["high"]
    assert line["basis"] == "t over 2 + 2 blocks"
    assert line["verdict"] == "fail"
    assert done.result["verdict"] == "fail"
    assert done.code == 1
    # Both sides decode the same texts; the prefix cache sees different salts.
    prompts = [
        {body["messages"][0]["content"] for path, body in server.seen.requests if "stream" in body and "messages" in body}
        for server in (a, b)
    ]  # fmt: skip
    assert prompts[0] & prompts[1]
    salts = [
        body["cache_salt"]
        for server in (a, b)
        for _, body in server.seen.requests
        if body.get("stream")
    ]
    assert len(set(salts)) == len(salts)


def test_needle_difference(qualify):
    with serving() as a, serving(needle="near", faulty=set(range(0, 400, 2))) as b:
        done = qualify(
            "ab",
            a.url,
            b.url,
            "--only",
            "needle",
            "--needle-requests",
            "60",
            "--needle-concurrency",
            "8",
        )
    line = done.line("ab.needle.difference")
    assert line["a"] == 1.0
    assert line["b"] == pytest.approx(0.5, abs=0.02)
    assert line["high"] < -0.3
    assert line["verdict"] == "fail"


def test_speculation_separates_acceptance_from_speed(qualify):
    """B accepts fewer drafts at the same steps/s: the step line passes, only acceptance fails."""
    with serving(decode_tok_s=300, accepted=2) as a, serving(decode_tok_s=200, accepted=1) as b:
        done = qualify(
            "ab", a.url, b.url, *QUICK, "--decode-window", "0.8", "--decode-max-tokens", "4000"
        )
    steps, accepted = done.line("ab.decode.2.steps_s"), done.line("ab.decode.2.accepted")
    assert steps["value"] == pytest.approx(1.0, abs=0.4)
    assert accepted["a"] == pytest.approx(3.0, abs=0.15)
    assert accepted["b"] == pytest.approx(2.0, abs=0.15)
    assert accepted["verdict"] == "fail"
    assert done.line("ab.decode.2.tok_s")["verdict"] == "info"


def test_restart_by_a_command_that_is_the_server(qualify, monkeypatch):
    """FAKE_SPEED is set for B only, so A must not inherit it."""
    monkeypatch.setenv("FAKE_SPEED", "4")
    port = free_port()
    command = shlex.join([sys.executable, str(FAKE), str(port)])
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", command, "--env-b", "FAKE_SPEED=40",
        "--restart-timeout", "30", *QUICK,
    )  # fmt: skip
    assert done.stops() == {}, done.err
    assert done.line("ab.decode.2.tok_s")["value"] < 0.5
    assert [arm["restart_environment"] for arm in done.result["arms"]] == [
        {},
        {"FAKE_SPEED": "<set>"},
    ]
    with socket.socket() as probe:  # the last server is gone
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_restart_by_a_command_that_replaces_the_server(qualify, tmp_path):
    """The command ends at once; a server that it started before is killed by its process id."""
    port = free_port()
    script = tmp_path / "replace.sh"
    script.write_text(
        f"#!/bin/sh\nif [ -f {tmp_path}/pid ]; then kill $(cat {tmp_path}/pid); sleep 0.3; fi\n"
        f"setsid {sys.executable} {FAKE} {port} >/dev/null 2>&1 & echo $! >{tmp_path}/pid\n"
    )
    script.chmod(0o755)
    try:
        done = qualify(
            "ab", f"http://127.0.0.1:{port}", "--restart", str(script), "--env-b", "FAKE_SPEED=40",
            "--restart-timeout", "30", *QUICK,
        )  # fmt: skip
    finally:
        import os
        import signal

        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert done.line("ab.decode.2.tok_s")["value"] < 0.5, done.err


def test_a_command_that_does_not_replace_the_server_is_found_out(qualify):
    with serving() as server:
        done = qualify(
            "ab",
            server.url,
            "--restart",
            "true",
            "--env-b",
            "X=1",
            "--restart-timeout",
            "1",
            *QUICK,
        )
    assert done.code == 4
    assert "does not replace it" in done.err


def test_a_command_that_fails(qualify):
    port = free_port()
    done = qualify(
        "ab",
        f"http://127.0.0.1:{port}",
        "--restart",
        "sh -c 'echo no GPU here; exit 7'",
        "--env-b",
        "X=1",
        *QUICK,
    )
    assert done.code == 4
    assert "status 7" in done.err
    assert "no GPU here" in done.err
    assert str(done.folder / "server-logs") in done.err
    # What a command prints may name users and paths: for the terminal alone.
    for name in ("result.json", "report.md", "report.html"):
        assert "no GPU here" not in (done.folder / name).read_text()
    # No fault in no request is no evidence.
    assert done.line("a.guard.faults")["verdict"] == "missing"
    assert done.line("a.guard.degenerate")["verdict"] == "missing"


@pytest.mark.parametrize("metrics", [True, False])
def test_an_unwell_server_is_not_a_new_one(qualify, metrics):
    """One error between two answers: the process may be the old one, and its start time says that it is."""
    with serving(unwell=frozenset({2}), metrics=metrics) as server:
        done = qualify(
            "ab", server.url, "--restart", "true", "--env-b", "X=1", "--restart-timeout", "1", *QUICK,
        )  # fmt: skip
    assert done.code == 4
    assert "does not replace it" in done.err
    assert not any(block["decode"] for block in done.result["blocks"])


def server_script(folder: Path) -> tuple[int, str]:
    """A port, and a script around a server on it that is not replaced by the server."""
    port, script = free_port(), folder / "serve.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} {FAKE} {port}\necho ended\n")
    script.chmod(0o755)
    return port, str(script)


def test_a_server_behind_a_script_is_awaited(qualify, tmp_path, monkeypatch):
    """The script ends at once when it is told to; the server takes its time and holds the address."""
    monkeypatch.setenv("FAKE_LINGER", "1.5")
    port, script = server_script(tmp_path)
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", script, "--env-b", "X=1", "--restart-timeout", "30", *QUICK,
    )  # fmt: skip
    assert done.result["status"] == "complete", done.err
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_ignores_the_signal_is_killed(qualify, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_LINGER", "1000")
    monkeypatch.setattr(restart, "_TERM_SECONDS", 1.0)
    port, script = server_script(tmp_path)
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", script, "--env-b", "X=1", "--restart-timeout", "30", *QUICK,
    )  # fmt: skip
    assert done.result["status"] == "complete", done.err


def test_question_a4_wants_the_counters_to_say_so(qualify):
    with serving(a4_rows=False) as a, serving(a4_rows=True) as b:
        done = qualify("ab", a.url, b.url, "--question", "a4", "--only", "prefill")
    assert done.line("a.a4.active")["value"] == 0.0
    assert done.line("b.a4.active")["value"] == 1.0
    assert done.line("b.a4.active")["verdict"] == "pass"
    # Both fakes prefill equally fast, which is not what A4 promises.
    assert done.line("ab.prefill.64")["limit"] == ">= 1.1"


def test_question_a4_armed_but_never_active_fails(qualify):
    with serving(a4_rows=False) as a, serving(a4_rows=False) as b:
        done = qualify("ab", a.url, b.url, "--question", "a4", "--only", "prefill")
    assert done.line("b.a4.active")["verdict"] == "fail"


def test_question_a4_without_any_evidence_is_missing(qualify):
    with serving() as a, serving() as b:
        done = qualify("ab", a.url, b.url, "--question", "a4", "--only", "prefill")
    assert done.line("b.a4.active")["verdict"] == "missing"
    assert done.result["verdict"] != "pass"


def test_question_sets_the_variable_for_a_restart(qualify):
    port = free_port()
    command = shlex.join(
        ["sh", "-c", f'FAKE_A4="$VLLM_B12X_CSF_COMPRESS" exec {sys.executable} {FAKE} {port}']
    )
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", command, "--question", "csf", "--only", "prefill",
        "--restart-timeout", "30",
    )  # fmt: skip
    assert [
        arm["restart_environment"]["VLLM_B12X_CSF_COMPRESS"] for arm in done.result["arms"]
    ] == ["0", "1"]
    assert [block["a4_rows"] > 0 for block in done.result["blocks"]] == [False, True, True, False]


def test_compare_two_results(qualify):
    with serving(decode_tok_s=400) as fast, serving(decode_tok_s=40) as slow:
        one = qualify("run", fast.url, out="one")
        two = qualify("run", slow.url, "--prefill-lengths", "64,128", out="two")
    done = qualify("compare", str(one.folder), str(two.folder / "result.json"), out="both")
    assert done.line("ab.decode.2.tok_s")["value"] < 0.5
    assert "blind to run-to-run change" in done.line("ab.decode.2.tok_s")["basis"]
    assert {line["id"] for line in done.result["lines"] if line["id"].startswith("ab.prefill")} == {
        "ab.prefill.64"
    }
    again = qualify("compare", str(one.folder), str(two.folder), out="both")
    assert again.code == 3


def test_compare_refuses_what_does_not_compare(qualify):
    with serving() as server:
        one = qualify("run", server.url, "--only", "needle", out="one")
        two = qualify("run", server.url, "--only", "needle", "--needle-concurrency", "2", out="two")
    done = qualify("compare", str(one.folder), str(two.folder), out="both")
    assert done.code == 3
    assert "other parameters" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "second address"),
        (["http://127.0.0.1:2", "--restart", "true"], "second address"),
        (["http://127.0.0.1:2", "--env-a", "X=1"], "need --restart"),
        (["http://127.0.0.1:1/v1"], "same address"),
        (["--restart", "true"], "same variables"),
        (["--restart", "sh 'x", "--env-a", "X=1"], "No closing quotation"),
        (["--restart", "/nowhere/serve.sh", "--question", "a4"], "/nowhere/serve.sh is no command"),
        (["--restart", "true", "--env-a", "X"], "NAME=VALUE"),
    ],
)
def test_wrong_usage(qualify, arguments, message):
    done = qualify("ab", "http://127.0.0.1:1", *arguments)
    assert done.code == 2
    assert message in done.err
    assert not done.folder.exists()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--prefill-lengths", "2X"], "'2X'"),
        (["--prefill-lengths", "64,64"], "twice"),
        (["--decode-concurrency", "9" * 5000], "no number"),
        (["--decode-window", "nan"], "nan"),
        (["--only", "speed"], "'speed'"),
        (["--skip", "speed"], "'speed'"),
        (["--needle-positions", "a"], "'a'"),
        (["--needle-template", "{"], "wanted a JSON object"),
        (["--needle-template", "[" * 100_000], "wanted a JSON object"),
    ],
)
def test_a_wrong_option_is_named(qualify, arguments, found):
    done = qualify("run", "http://127.0.0.1:1", *arguments)
    assert done.code == 2
    assert f"error: {arguments[0]}:" in done.err
    assert found in done.err
    assert not done.folder.exists()


def test_help_names_each_default_once(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert "(default: )" not in text
    assert "(default: spread evenly)" in " ".join(text.split())
