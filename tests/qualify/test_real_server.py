# SPDX-License-Identifier: Apache-2.0
"""scripts/qualify against vLLM 0.33.0's own API server, with speculative decoding, on this machine's CPU."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from b12x_overlay.qualify.needle import make_task
from b12x_overlay.qualify.settings import NeedlePlan
from support.paths import TESTS, pythonpath

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
# Greedy, because the stand-in for the sampler knows nothing else; a random model's greedy text is a loop.
DECODE = ["--decode-temperature", "0", "--decode-ignore-eos", "--decode-max-tokens", "400"]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


@contextlib.contextmanager
def serving(module: str, folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """``python -m MODULE`` of these tests, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "B12X_"))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder / "tiny-random"), str(port), *options],
            stdout=output, stderr=output, cwd=TESTS, start_new_session=True,
            env=inherited | {
                "PYTHONPATH": pythonpath("patched", None), "PYTHONDONTWRITEBYTECODE": "", "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CACHE_ROOT": str(folder / "cache"),  # so that vLLM inspects the model as on a new machine
            } | environment,
        )  # fmt: skip
    found = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                if httpx.get(f"{found.url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            end = log.read_text(errors="replace")[-4000:]
            assert process.poll() is None, end
            assert time.monotonic() < deadline, end
            time.sleep(0.5)
        yield found
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    with serving("qualify.vllm_server", folder, "--speculative-config", SPECULATION) as found:
        yield found


def test_a_whole_run(qualify, server):
    done = qualify(
        "run", server.url, "--prefill-lengths", "300,1500", "--decode-concurrency", "1,3", "--decode-window", "1",
        *DECODE, "--needle-requests", "4", "--needle-max-tokens", "24",
        "--stall-timeout", "60", "--request-timeout", "120", "--decode-ramp", "60",
    )  # fmt: skip
    assert done.result["status"] == "complete", done.err
    assert done.stops() == {}, server.log.read_text()[-3000:]
    arm = done.result["arms"][0]
    assert arm["abilities"] == dict.fromkeys(arm["abilities"], True)
    assert arm["identity"]["model"] == "tiny-random"  # served by its path
    assert arm["identity"]["versions"]["vllm"] == "0.33.0"
    assert arm["identity"]["settings"]["max_num_seqs"] == "8"
    assert arm["identity"]["settings"]["num_speculative_tokens"] == "2"

    block = done.result["blocks"][0]
    assert [s["prompt_tokens"] for s in block["prefill"]] == [300, 300, 1500, 1500]
    assert {s["counted_by"] for s in block["prefill"]} == {"tokenizer"}
    for sample in block["decode"]:
        # Three counts of the same tokens: streams, the server's counter, and steps times tokens per step. Not equal,
        # because the counters are read at some moment of a request and a busy machine answers it late.
        assert 0.7 < sample["tok_s"] / sample["server_tok_s"] < 1.4
        product = sample["steps_s"] * sample["concurrency"] * sample["accepted_per_step"]
        assert 0.7 < sample["tok_s"] / product < 1.4
        assert 1 <= sample["accepted_per_draft"] <= 3
        assert sample["accepted_per_step"] <= 3.0001

    # A random model calls no tool; every byte of the task is one token.
    run = block["needle"][0]
    task = make_task(NeedlePlan(records=10))
    text = sum(len(message["content"].encode()) for message in task.messages())
    assert run["prompt_tokens"] == text + 2 * 2 + 1
    assert {answer["outcome"] for answer in run["answers"]} <= {"FAIL", "TRUNC"}
    assert done.line("needle.exact")["verdict"] == "fail"
    assert set(done.faults()) <= {"truncated", "repetition", "empty"}


def test_prompts_are_cold(qualify, server):
    hits = server.metric("vllm:prefix_cache_hits_total")
    queries = server.metric("vllm:prefix_cache_queries_total")
    qualify(
        "run", server.url, "--only", "prefill", "--prefill-lengths", "600", "--stall-timeout", "60"
    )
    assert server.metric("vllm:prefix_cache_queries_total") >= queries + 3 * 600
    # The probe's own request may hit; no block of a measured prompt may.
    assert server.metric("vllm:prefix_cache_hits_total") == hits


def test_more_streams_than_the_server_takes(qualify, server):
    done = qualify(
        "run", server.url, "--only", "decode", "--decode-concurrency", "12", "--decode-ramp", "4",
        *DECODE, "--decode-max-tokens", "4000", "--stall-timeout", "60", "--request-timeout", "60",
    )  # fmt: skip
    assert "not_saturated" in done.faults()
    assert ": 8 of 12 streams ran" in done.stops()["decode C12"]


def test_a_server_that_is_killed(qualify, server):
    """The last test of this module: the server does not come back."""
    import threading

    threading.Timer(2.0, os.killpg, (server.process.pid, signal.SIGKILL)).start()
    done = qualify(
        "run", server.url, "--only", "decode,needle", "--decode-window", "30", *DECODE, "--decode-max-tokens", "6000",
        "--stall-timeout", "60",
    )  # fmt: skip
    assert done.code == 4
    assert done.result["status"] == "partial"
    # "not_saturated" where it dies before all streams run
    assert {"connect", "disconnect", "not_saturated"} & set(done.faults())
    assert done.result["verdict"] == "fail"


def test_an_armed_server_says_that_a4_ran(qualify, tmp_path):
    """A calibrated MoE model with compressed scales behind vLLM's own API server: its counters reach /metrics."""
    counters = tmp_path / "prometheus"
    counters.mkdir()
    environment = {
        "B12X_W4A16_A4_PREFILL_MIN_TOKENS": "1", "VLLM_B12X_MOE_FP4_FORCE_A16": "1", "VLLM_B12X_CSF_COMPRESS": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(counters),
    }  # fmt: skip
    with serving("qualify.moe_server", tmp_path, "--moe-backend", "b12x", **environment) as server:
        done = qualify(
            "run", server.url, "--only", "prefill", "--prefill-lengths", "300,700", "--stall-timeout", "60",
            "--server-log", str(server.log),
        )  # fmt: skip
        log = server.log.read_text(errors="replace")
    assert "A4 prefill: 2 of 2 MoE layers armed" in log
    assert "NVFP4-CSF: block scales of 2 MoE layers" in log
    block = done.result["blocks"][0]
    assert [s["prompt_tokens"] for s in block["prefill"]] == [300, 300, 700, 700]
    line = done.line("a4.active")
    assert (line["value"], line["basis"]) == (1.0, "the server's counters")
    # One warm-up of each length, and every prompt's every row.
    assert block["a4_rows"] == 3 * 300 + 3 * 700
    assert not block["a4_missed_rows"]
