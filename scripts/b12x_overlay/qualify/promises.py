# SPDX-License-Identifier: Apache-2.0
"""What only an owner of the hardware can answer, and where the answer is read.

* Is A4 really active? The overlay's counters in /metrics, else its lines in the server's log.
* Does decode of an armed server keep the speed of an unarmed one (the packed kernels)?
* Do compressed scales (CSF), and their prefetch, keep or gain speed? And were they compressed? The overlay logs it.

The speed is told by A/B runs that differ in one environment variable: `QUESTIONS` names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from b12x_overlay.qualify.schema import Arm

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
_COMPRESSED = re.compile(r"NVFP4-CSF: block scales of [1-9]\d* MoE layers")
"""Text of overlay/vllm/model_executor/layers/quantization/nvfp4_csf/owner.py."""


def read_log(text: str) -> LogState:
    """What a server's log says of A4 since its last start: a first A4 call was made, layers were armed, or neither.

    Logs are appended to (journald, ``docker logs``, ``>>``), and an earlier start says nothing of this server.
    """
    text = text.rpartition(_START)[2]
    if _ACTIVE.search(text):
        return "active"
    armed = [match for match in _ARMED.finditer(text) if int(match[1]) > 0]
    return "armed" if armed else "off"


def is_compressed(text: str) -> bool:
    """Whether a server's log says since its last start that block scales were compressed."""
    return _COMPRESSED.search(text.rpartition(_START)[2]) is not None


def note_log(arm: Arm, path: Path) -> None:
    """Keep in *arm* what the log of a start says, together with what those of earlier starts said. Raises OSError.

    What it does not say counts only if vLLM's first line of that start is in it: else it may be the output of a command
    that is no server, or a log that was cut.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = _START in text
    state, compressed = read_log(text), is_compressed(text)
    if whole or state != "off":
        order = ("off", "armed", "active")
        arm.a4_log = max(state, arm.a4_log or "off", key=order.index)
    if whole or compressed:
        said: Literal["on", "off"] = "on" if compressed else "off"
        arm.csf_log = said if arm.csf_log in (None, said) else "mixed"
