# SPDX-License-Identifier: Apache-2.0
"""A4 and CSF: a question passes only with evidence that what it asks about ran, on the side where it should."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
from b12x_overlay.paths import OVERLAY
from b12x_overlay.qualify import csf_lines, promises
from b12x_overlay.qualify.documents import take
from b12x_overlay.qualify.report import html, markdown
from b12x_overlay.qualify.schema import Result
from qualify.fake_server import serving
from qualify.made_results import (
    ABILITIES,
    LENGTH,
    arm,
    block,
    has,
    line,
    made,
    needle,
    prefill,
    stated,
)
from qualify.test_ab import FAKE, free_port

START = "INFO Initializing a V1 LLM engine (v0.33.0) with config: model='m'\n"
CSF = "INFO NVFP4-CSF: block scales of 45 MoE layers on this rank: 9 bytes plain, 8 bytes compressed\n"
SENT = 2 * LENGTH
OFF, ON = {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "0"}, {"B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1"}


def a4(rows_a: int | None, rows_b: int | None, *, missed: int | None = None, arms=None) -> Result:
    """Order A B B A, every prompt cold and of `LENGTH` tokens, two per block."""
    rows = {"A": rows_a, "B": rows_b}
    return made(
        *(
            block(name, prefill=prefill(100.0, 101.0), a4_rows=rows[name], a4_missed_rows=missed if name == "B" else None)
            for name in "ABBA"
        ),
        question="a4", arms=arms,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "missed", "verdict"),
    [
        (SENT + LENGTH, None, "pass"),  # a warm-up, too
        (SENT // 2, None, "pass"),
        (SENT // 2 - 1, None, "fail"),
        (1, None, "fail"),
        (0, None, "fail"),
        (SENT // 2 - 1, 10, "pass"),  # a graph took the rest
        (100, SENT - 100, "inconclusive"),
        (0, SENT, "fail"),
    ],
)
def test_a4_rows_must_be_in_proportion_to_the_prompts(rows, missed, verdict):
    found = line(a4(0, rows, missed=missed), "b.a4.active")
    assert found.verdict == verdict
    assert (
        f"{2 * rows:,} prefill rows ran with A4, {2 * SENT:,} prompt tokens were sent" in found.note
    )
    if missed:
        assert f"{2 * missed:,} rows ran in W4A16 from a CUDA graph" in found.note


def test_every_block_needs_its_rows():
    """Twice as many in one block do not make up for none in the other."""
    blocks = [block(name, prefill=prefill(100.0), a4_rows=0) for name in "ABBA"]
    blocks[1].a4_rows = 10 * LENGTH
    found = line(made(*blocks, question="a4"), "b.a4.active")
    assert (found.value, found.verdict) == (0.0, "fail")
    assert "too few rows in block 3" in found.note
    blocks[2].a4_rows = None
    assert line(made(*blocks, question="a4"), "b.a4.active").verdict == "missing"


def test_cold_needle_prompts_count_as_sent():
    def judged(rows: int, salt: str) -> str:
        blocks = [
            block(name, needle=needle((20, 20), prompt_tokens=100), a4_rows=rows if name == "B" else 0)
            for name in "AB"
        ]  # fmt: skip
        return line(made(*blocks, question="a4", salt=salt), "b.a4.active").verdict

    assert judged(1000, "request") == "pass"
    assert judged(999, "request") == "fail"
    assert judged(999, "run") == "pass"  # the cache served most of them


@pytest.mark.parametrize(
    ("rows", "missed", "verdict"), [(0, None, "pass"), (1, None, "fail"), (0, 5, "fail")]
)
def test_a_side_that_should_not_run_a4_ran_none_and_is_not_armed(rows, missed, verdict):
    blocks = [
        block(name, prefill=prefill(100.0), a4_rows=rows if name == "A" else LENGTH, a4_missed_rows=missed)
        for name in "AB"
    ]  # fmt: skip
    assert line(made(*blocks, question="a4"), "a.a4.active").verdict == verdict


@pytest.mark.parametrize(
    ("a", "b", "metrics", "verdict"),
    [
        (OFF, ON, True, "pass"),
        ({}, {}, True, "missing"),  # two servers
        (OFF, ON, False, "missing"),
        (OFF, ON | {"PROMETHEUS_MULTIPROC_DIR": "<set>"}, True, "missing"),
    ],
)
def test_no_counter_means_no_row_only_after_a_restart_of_the_same_set_up(a, b, metrics, verdict):
    arms = [
        arm("A", restart_environment=a, abilities=ABILITIES | {"metrics": metrics}),
        arm("B", restart_environment=b),
    ]
    found = line(a4(None, SENT, arms=arms), "a.a4.active")
    assert found.verdict == verdict
    assert line(a4(SENT, None, arms=arms), "b.a4.active").verdict != "pass"


def test_a_restarted_server_is_off_without_a_counter(qualify):
    port = free_port()
    command = shlex.join(
        ["sh", "-c", f'[ "$B12X_W4A16_A4_PREFILL_MIN_TOKENS" = 0 ] || export FAKE_A4=1; exec {sys.executable} {FAKE} {port}']
    )  # fmt: skip
    done = qualify(
        "ab", f"http://127.0.0.1:{port}", "--restart", command, "--question", "a4", "--only", "prefill",
        "--restart-timeout", "30",
    )  # fmt: skip
    assert (done.line("a.a4.active")["value"], done.line("a.a4.active")["verdict"]) == (0.0, "pass")
    assert done.line("b.a4.active")["verdict"] == "pass", done.line("b.a4.active")


# Compressed block scales


def csf(question: str | None = "csf", **of_b) -> Result:
    """A is off by its log."""
    arms = [arm("A", csf_log="off"), arm("B", **of_b)]
    blocks = [block(name, prefill=prefill(100.0, 101.0)) for name in "ABBA"]
    return made(*blocks, question=question, arms=arms)


def test_the_log_line_is_the_overlays():
    folder = OVERLAY / "vllm/model_executor/layers/quantization/nvfp4_csf"
    assert "NVFP4-CSF: block scales of {len(self.layers)} MoE layers" in (
        folder / "owner.py"
    ).read_text(encoding="utf-8")
    settings = (folder / "settings.py").read_text(encoding="utf-8")
    assert f'"{csf_lines.COMPRESS}"' in settings
    assert f'"{csf_lines.PREFETCH}"' in settings
    report = (OVERLAY / "vllm/model_executor/layers/fused_moe/b12x_a4/report.py").read_text()
    listed = report.split("_NVFP4_METHODS = frozenset(")[1].split(")")[0]
    assert set(re.findall(r'"(\w+)"', listed)) == csf_lines._COMPRESSIBLE | {"nvfp4_csf"}
    assert promises.is_compressed(START + CSF)
    assert not promises.is_compressed(CSF + START)
    assert not promises.is_compressed(START + CSF.replace("45", "0"))


def test_csf_that_never_ran_does_not_pass(qualify):
    with serving() as a, serving() as b:
        done = qualify("ab", a.url, b.url, "--question", "csf", "--only", "prefill")
    for side in "ab":
        found = done.line(f"{side}.csf.active")
        assert (found["value"], found["verdict"]) == (None, "missing")
        assert "--server-log" in found["note"]
    assert done.result["verdict"] in ("incomplete", "fail")
    assert done.code == 1


@pytest.mark.parametrize(
    ("a", "b", "verdicts"), [("", CSF, ("pass", "pass")), (CSF, "", ("fail", "fail"))]
)
def test_the_servers_log_says_whether_scales_were_compressed(qualify, tmp_path, a, b, verdicts):
    logs = {name: tmp_path / f"{name}.log" for name in "ab"}
    for name, text in (("a", a), ("b", b)):
        logs[name].write_text(START + text)
    with serving() as one, serving() as two:
        done = qualify(
            "ab", one.url, two.url, "--question", "csf", "--only", "prefill",
            "--server-log-a", str(logs["a"]), "--server-log-b", str(logs["b"]),
        )  # fmt: skip
    assert tuple(done.line(f"{side}.csf.active")["verdict"] for side in "ab") == verdicts
    assert done.line("b.csf.active")["basis"] == "the server's log"
    assert "block scales compressed" in (done.folder / "report.md").read_text()
    assert 'id="b.csf.active"' in (done.folder / "report.html").read_text()


def test_a_restart_that_forwards_the_variable_and_one_that_does_not(qualify, tmp_path):
    """The fake prints vLLM's first line, and the overlay's if the variable arrives."""
    script, port = tmp_path / "serve.sh", free_port()
    for forwards, verdict in (("$VLLM_B12X_CSF_COMPRESS", "pass"), ("0", "fail")):
        script.write_text(
            f"#!/bin/sh\nprintf %s '{START}'\nif [ \"{forwards}\" = 1 ]; then printf %s '{CSF}'; fi\n"
            f"exec {sys.executable} {FAKE} {port}\n"
        )
        script.chmod(0o755)
        done = qualify(
            "ab", f"http://127.0.0.1:{port}", "--restart", str(script), "--question", "csf", "--only", "prefill",
            "--restart-timeout", "30", out=verdict,
        )  # fmt: skip
        assert done.line("a.csf.active")["verdict"] == "pass"
        assert done.line("b.csf.active")["verdict"] == verdict


def test_what_a_log_does_not_say_counts_only_after_the_servers_first_line(tmp_path):
    """A compose command prints no server's log; a log that was cut lacks the start."""
    log, side = tmp_path / "log", arm("A")
    log.write_text("Container vllm started\n")
    promises.note_log(side, log)
    assert (side.csf_log, side.a4_log) == (None, None)
    log.write_text(START)
    promises.note_log(side, log)
    assert (side.csf_log, side.a4_log) == ("off", "off")
    log.write_text(CSF)
    promises.note_log(side, log)
    assert side.csf_log == "mixed"
    promises.note_log(side, log)
    assert side.csf_log == "mixed"


@pytest.mark.parametrize(
    ("log", "verdict"), [("on", "pass"), ("off", "fail"), ("mixed", "fail"), (None, "missing")]
)
def test_csf_by_the_log(log, verdict):
    result = csf(csf_log=log)
    assert line(result, "b.csf.active").verdict == verdict
    assert line(result, "a.csf.active").verdict == "pass"
    mixed = made(block("A", prefill=prefill(1.0)), block("B", prefill=prefill(1.0)), question="csf",
                 arms=[arm("A", csf_log="mixed"), arm("B", csf_log="on")])  # fmt: skip
    assert line(mixed, "a.csf.active").verdict == "fail"


COMPRESS = {"VLLM_B12X_CSF_COMPRESS": "1"}
NVFP4 = {"quantization": "modelopt_fp4"}
DOCTOR = "b12x-overlay-doctor/1"


@pytest.mark.parametrize(
    ("identity", "restart", "verdict"),
    [
        (stated("/server_info", environment=COMPRESS, settings=NVFP4), {}, "pass"),
        (stated("/server_info", environment=COMPRESS, settings=NVFP4), COMPRESS, "pass"),
        (stated("/server_info", settings={"quantization": "nvfp4_csf"}), {}, "pass"),
        (stated("/server_info", environment=COMPRESS, settings={"quantization": "fp8"}), {}, "missing"),
        (stated("/server_info", environment=COMPRESS), {}, "missing"),
        (stated("/server_info", settings=NVFP4), COMPRESS, "fail"),  # not forwarded
        (stated("/server_info", settings=NVFP4, manifest={"active": ["NVFP4-CSF"]}), {}, "fail"),
        (stated(DOCTOR, environment=COMPRESS, manifest={"active": ["NVFP4-CSF"]}), {}, "pass"),
        (stated(DOCTOR, environment=COMPRESS, manifest={"active": ["NVFP4-CSF"]}), COMPRESS, "missing"),
        (stated(DOCTOR, environment=COMPRESS), {}, "missing"),  # not decided there
        (stated(DOCTOR), {}, "fail"),
        (stated(environment=COMPRESS), {}, "missing"),  # nobody knows who says so
        (stated(), COMPRESS, "missing"),
    ],
)  # fmt: skip
def test_csf_by_what_the_server_states(identity, restart, verdict):
    result = csf(identity=identity, restart_environment=restart)
    assert line(result, "b.csf.active").verdict == verdict


def test_the_log_counts_for_more_than_the_settings():
    on = stated("/server_info", environment=COMPRESS, settings=NVFP4)
    assert line(csf(identity=on, csf_log="off"), "b.csf.active").verdict == "fail"


def test_the_server_itself_counts_for_more_than_a_doctor_report():
    identity = stated("/server_info", environment={"VLLM_B12X_CSF_COMPRESS": "0"})
    take(identity, {"schema": DOCTOR, "settings": COMPRESS | ON})
    assert identity.environment == {"VLLM_B12X_CSF_COMPRESS": "0"} | ON


def test_prefetch_wants_compressed_scales_on_both_sides_and_itself_on_one():
    off = {"VLLM_B12X_CSF_SCALE_PREFETCH": "0"}
    blocks = [block(name, prefill=prefill(100.0, 101.0)) for name in "ABBA"]

    def verdicts(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
        arms = [
            arm(name, identity=stated("/server_info", environment=said, settings=NVFP4))
            for name, said in (("A", a), ("B", b))
        ]
        result = made(*blocks, question="prefetch", arms=arms)
        return {found.id: str(found.verdict) for found in result.lines if ".csf." in found.id}

    both = {"a.csf.active": "pass", "b.csf.active": "pass"}
    right = both | {"a.csf.prefetch": "pass", "b.csf.prefetch": "pass"}
    assert verdicts(COMPRESS | off, COMPRESS) == right
    assert verdicts(COMPRESS, COMPRESS) == right | {"a.csf.prefetch": "fail"}
    assert verdicts(COMPRESS | off, COMPRESS | off) == right | {"b.csf.prefetch": "fail"}
    assert verdicts(off, {}) == right | {"a.csf.active": "fail", "b.csf.active": "fail"}
    unknown = made(
        *blocks, question="prefetch", arms=[arm("A", csf_log="on"), arm("B", csf_log="on")]
    )
    assert line(unknown, "b.csf.prefetch").verdict == "missing"
    assert unknown.verdict != "pass"


def test_without_the_question_csf_has_a_line_where_there_is_something_to_say():
    assert not has(csf(None), "a.csf.active")
    assert line(csf(None, csf_log="on"), "b.csf.active").verdict == "info"
    # Asked for by its variable, and not there: a switch that does nothing must not go unseen.
    assert (
        line(csf(None, csf_log="off", restart_environment=COMPRESS), "b.csf.active").verdict
        == "fail"
    )
    alone = made(block("A", prefill=prefill(1.0)), arms=[arm("A", csf_log="on")])
    assert line(alone, "csf.active").title == "block scales compressed"


def test_promises_stand_in_the_comparison_and_not_among_each_sides_figures():
    result = csf(csf_log="on")
    text, page = markdown(result), html(result)
    assert "| B: block scales compressed |" in text
    assert page.index('id="b.csf.active"') < page.index('id="sides"')
