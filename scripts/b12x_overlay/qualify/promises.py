# SPDX-License-Identifier: Apache-2.0
"""What only an owner of the hardware can answer, and where the answer is read.

* Is A4 really active? The overlay's counters in /metrics, else its lines in the server's log.
* Does decode of an armed server keep the speed of an unarmed one (the packed kernels)?
* Do compressed scales (CSF), and their prefetch, keep or gain speed?

The last three are A/B runs that differ in one environment variable: `QUESTIONS` names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Names and texts of overlay/vllm/model_executor/layers/fused_moe/b12x_a4/{counters,report}.py. The counters are in
# /metrics only with Prometheus' multiprocess mode, and appear there with their first count.
A4_ROWS = "vllm:b12x_a4_prefill_rows_total"
A4_MISSED_ROWS = "vllm:b12x_a4_graph_rows_total"

LogState = Literal["active", "armed", "off"]


@dataclass(frozen=True)
class Question:
    """An A/B in which one variable differs."""

    title: str
    variable: str
    a: str
    b: str


QUESTIONS = {
    "a4": Question("A4 prefill, off against on", "B12X_W4A16_A4_PREFILL_MIN_TOKENS", "0", "1"),
    "csf": Question("compressed block scales, off against on", "VLLM_B12X_CSF_COMPRESS", "0", "1"),
    "prefetch": Question(
        "scale prefetch, off against on", "VLLM_B12X_CSF_SCALE_PREFETCH", "0", "1"
    ),
}

_START = "Initializing a V1 LLM engine"
"""vLLM logs it at every start, before anything is loaded (v1/engine/core.py)."""
_ARMED = re.compile(r"A4 prefill: (?:draft model: )?(\d+) of \d+ MoE layers armed")
_ACTIVE = re.compile(r"First A4 prefill call")


def read_log(text: str) -> LogState:
    """What a server's log says of A4 since its last start: a first A4 call was made, layers were armed, or neither.

    Logs are appended to (journald, ``docker logs``, ``>>``), and an earlier start says nothing of this server.
    """
    text = text.rpartition(_START)[2]
    if _ACTIVE.search(text):
        return "active"
    armed = [match for match in _ARMED.finditer(text) if int(match[1]) > 0]
    return "armed" if armed else "off"


def read_log_file(path: Path) -> LogState:
    """As `read_log` for a file. Raises OSError."""
    return read_log(path.read_text(encoding="utf-8", errors="replace"))
