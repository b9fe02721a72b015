# SPDX-License-Identifier: Apache-2.0
"""The result: what `result.json` holds. ``scripts/qualify schema`` prints it as JSON Schema."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from b12x_overlay.qualify.faults import FaultKind
from b12x_overlay.qualify.settings import Plan, Thresholds

ArmName = Literal["A", "B"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FaultCount(_Part):
    """Requests of one kind of failure."""

    kind: FaultKind = Field(description="the fault's name")
    count: int = Field(ge=1, description="how often it was seen")
    example: str = Field(description="what was seen the first time, redacted")


class PrefillSample(_Part):
    """One cold request."""

    length: int = Field(description="prompt tokens asked for")
    prompt_tokens: int = Field(
        description="prompt tokens by the server's tokenizer (or its usage statistics)"
    )
    counted_by: Literal["tokenizer", "usage"] = Field(description="what prompt_tokens is from")
    ttft_s: float = Field(
        description="seconds from sending the request to the first generated token"
    )
    tok_s: float = Field(description="prompt_tokens / ttft_s")
    busy: bool | None = Field(
        description="the server had other requests at the start, the end or in between; null without metrics"
    )


class DecodeSample(_Part):
    """One window in which every stream was busy."""

    concurrency: int = Field(description="streams kept busy")
    seconds: float = Field(description="length of the window")
    tokens: int = Field(
        description="output tokens in the window, from the streams' usage statistics"
    )
    tok_s: float = Field(description="tokens / seconds")
    answers_restarted: int = Field(
        description="answers that ended and were replaced inside the window"
    )
    longest_gap_s: float = Field(description="longest time without an event in any stream")
    client_busy: float = Field(
        description="share of one CPU core that this program used; near 1 it limits the rate"
    )
    steps: int | None = Field(default=None, description="engine steps, from the server's metrics")
    steps_s: float | None = Field(default=None, description="engine steps per second")
    accepted_per_step: float | None = Field(
        default=None,
        description="with speculative decoding: tokens per engine step and stream, so that tok_s is about "
        "steps_s x concurrency x accepted_per_step",
    )
    accepted_per_draft: float | None = Field(
        default=None,
        description="1 + accepted draft tokens / drafts; equal to accepted_per_step if every step drafts",
    )
    server_tok_s: float | None = Field(
        default=None, description="the same rate by the server's own counter of generated tokens"
    )
    running: float | None = Field(
        default=None, description="requests running at the window's end, by the server"
    )


class NeedleOutcome(StrEnum):
    """What one answer is."""

    EXACT = "EXACT"
    NEAR_MISS = "NEAR_MISS"
    WRONG_SUM = "WRONG_SUM"
    WRONG_FACTS = "WRONG_FACTS"
    FAIL = "FAIL"
    TRUNC = "TRUNC"
    ERROR = "ERROR"
    """No answer: the request itself failed; not counted among the answers."""


class NeedleAnswer(_Part):
    """One request of a needle run."""

    index: int = Field(description="number of the request in its run")
    outcome: NeedleOutcome = Field(description="what the answer is")
    why: str | None = Field(default=None, description="for anything but EXACT")


class NeedleRun(_Part):
    """One run."""

    run: int = Field(description="number of the run in its block, from 0")
    prompt_tokens: int | None = Field(
        default=None, description="length of the task, by the server's usage statistics"
    )
    answers: list[NeedleAnswer] = Field(
        default_factory=list, description="one per request, in order of their numbers"
    )


class CellStop(_Part):
    """A measurement that was given up."""

    cell: str = Field(description="for example 'prefill 8192', 'decode C8', 'needle run 1'")
    why: str = Field(description="what was seen")


class Block(_Part):
    """One turn of one arm: all measurements once."""

    arm: ArmName = Field(description="whose turn it is")
    index: int = Field(description="place in the order, from 0")
    started: datetime | None = Field(default=None, description="null: not yet")
    done: bool = Field(default=False, description="all its measurements are made or given up")
    prefill: list[PrefillSample] = Field(default_factory=list, description="requests")
    decode: list[DecodeSample] = Field(default_factory=list, description="windows")
    needle: list[NeedleRun] = Field(default_factory=list, description="runs")
    faults: list[FaultCount] = Field(
        default_factory=list, description="failed requests and degenerate answers"
    )
    stopped: list[CellStop] = Field(
        default_factory=list, description="measurements that were given up"
    )
    a4_rows: int | None = Field(
        default=None, description="prefill rows run with A4 in this block, by the server's counter"
    )
    a4_missed_rows: int | None = Field(
        default=None, description="prefill rows that a graph ran in W4A16, by the counter"
    )


class Identity(_Part):
    """What the server says it is, without hosts, paths, keys and user names."""

    model: str = Field(description="served name, without folders")
    max_model_len: int | None = Field(default=None, description="context in tokens")
    versions: dict[str, str] = Field(default_factory=dict, description="package to version")
    environment: dict[str, str] = Field(
        default_factory=dict, description="variables that change what is measured"
    )
    gpus: list[str] = Field(default_factory=list, description="names")
    manifest: dict[str, str | list[str]] = Field(
        default_factory=dict, description="patch set and image, if stated"
    )
    settings: dict[str, str] = Field(
        default_factory=dict, description="server settings that matter, if it tells them"
    )
    sources: list[str] = Field(default_factory=list, description="where this was read")


class Arm(_Part):
    """One server, or one set of environment variables of it."""

    name: ArmName = Field(description="A, or B in a comparison")
    label: str = Field(description="name in the reports")
    restart_environment: dict[str, str] = Field(
        default_factory=dict, description="variables given to --restart for this side"
    )
    identity: Identity | None = Field(
        default=None, description="null until the arm was reached for the first time"
    )
    abilities: dict[str, bool] = Field(
        default_factory=dict, description="interfaces that were found"
    )
    a4_log: Literal["active", "armed", "off"] | None = Field(
        default=None, description="what the server's log says of A4"
    )
    csf_log: Literal["on", "off", "mixed"] | None = Field(
        default=None,
        description="whether the server's log says that block scales were compressed; mixed: not after every start",
    )


class VerdictKind(StrEnum):
    """What a line says about its limit."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    INFO = "info"
    """No limit is set for it."""
    MISSING = "missing"
    """Asked for, but not measured."""


class Line(_Part):
    """One figure with its interval, its limit and the verdict."""

    id: str = Field(description="stable name, for example 'ab.decode.8.steps_s'")
    title: str = Field(description="for people")
    unit: str = Field(description="'ratio', 'share', or the unit of a rate; empty for counts")
    value: float | None = Field(description="null: not measured")
    low: float | None = Field(default=None, description="lower end of the interval")
    high: float | None = Field(default=None, description="upper end of the interval")
    a: float | None = Field(
        default=None,
        description="A/B only: A's figure; of a ratio the geometric mean that it is made of",
    )
    b: float | None = Field(
        default=None, description="A/B only: B's figure, likewise: value is b / a, or b - a"
    )
    basis: str = Field(description="what value and interval are computed from")
    limit: str | None = Field(default=None, description="what is required; null: nothing")
    verdict: VerdictKind = Field(description="what the limit says")
    note: str | None = Field(default=None, description="what else to know")


class Result(_Part):
    """One qualification: plan, servers, samples and verdicts."""

    schema_id: Literal["b12x-overlay-qualify/1"] = Field(
        default="b12x-overlay-qualify/1", description="this schema"
    )
    run_id: str = Field(description="random; salts the prompts")
    tool: dict[str, str] = Field(description="versions of this program and its libraries")
    created: datetime = Field(description="start of the first run")
    updated: datetime = Field(description="last measurement")
    status: Literal["partial", "complete"] = Field(description="complete: every block is done")
    stop: str | None = Field(default=None, description="why a partial run stopped")
    question: Literal["a4", "csf", "prefetch"] | None = Field(
        default=None, description="what A and B differ in"
    )
    plan: Plan = Field(description="what is measured")
    thresholds: Thresholds = Field(description="limits of the last judgement")
    arms: list[Arm] = Field(description="one server, or A and B")
    blocks: list[Block] = Field(description="in order of time")
    lines: list[Line] = Field(default_factory=list, description="figures with verdicts")
    verdict: Literal["pass", "fail", "inconclusive", "incomplete"] = Field(
        default="incomplete", description="fail before incomplete before inconclusive before pass"
    )
    notes: list[str] = Field(
        default_factory=list,
        description="what else to know of a comparison: different models, what was left out",
    )
