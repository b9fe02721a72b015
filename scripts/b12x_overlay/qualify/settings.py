# SPDX-License-Identifier: Apache-2.0
"""What a run measures (`Plan`) and what it must reach (`Thresholds`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from b12x_overlay.qualify.errors import UsageError

DEFAULT_THRESHOLDS = Path(__file__).with_name("thresholds.toml")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrefillPlan(_Part):
    """Prompt tokens over time to first token, one cold request at a time."""

    lengths: tuple[Annotated[int, Field(ge=16, le=4_000_000)], ...] = Field(
        default=(2048, 8192, 32768), description="prompt lengths in tokens"
    )
    repeats: int = Field(
        default=5, ge=1, le=1000, description="counted requests per length and block"
    )
    warmups: int = Field(
        default=1,
        ge=0,
        le=100,
        description="uncounted requests per length and block (the first compiles)",
    )
    answer_tokens: int = Field(default=8, ge=1, le=256, description="tokens generated per request")


class DecodePlan(_Part):
    """Output tokens per second while a fixed number of streams is kept busy."""

    concurrency: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        default=(1, 8, 16), description="streams kept busy at once"
    )
    windows: int = Field(
        default=3, ge=1, le=1000, description="counted windows per concurrency and block"
    )
    window_seconds: float = Field(default=10.0, gt=0, le=3600, description="length of a window")
    settle_seconds: float = Field(
        default=3.0, ge=0, le=600, description="uncounted time after the last stream's first token"
    )
    ramp_seconds: float = Field(
        default=180.0, gt=0, le=3600, description="limit for all streams to get a first token"
    )
    max_tokens: int = Field(
        default=4096,
        ge=8,
        le=1_000_000,
        description="length of one answer; a new one starts at once",
    )
    temperature: float = Field(default=1.0, ge=0, le=2, description="sampling temperature")
    ignore_eos: bool = Field(
        default=False,
        description="write on past an answer's natural end; its text is then not judged",
    )


class NeedlePlan(_Part):
    """Hidden facts and a checksum that must come back in exactly one tool call."""

    runs: int = Field(default=3, ge=1, le=100, description="runs per block")
    salt: Literal["request", "run"] = Field(
        default="request",
        description="what has a prefix cache of its own: with 'run' one prefill serves all answers of a run, which is "
        "quicker, but they are no independent answers then and their lines are never conclusive",
    )
    requests: int = Field(default=500, ge=1, le=100_000, description="requests per run")
    concurrency: int = Field(
        default=8, ge=1, le=1024, description="requests in flight; only equal values compare"
    )
    records: int = Field(default=280, ge=0, le=1_000_000, description="records around the facts")
    facts: int = Field(default=3, ge=1, le=16, description="hidden facts")
    fact_positions: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        default=(), description="place of each fact as a share of the records; empty: spread evenly"
    )
    task_seed: str = Field(
        default="b12x-overlay-1", min_length=1, description="seed of records, facts and values"
    )
    variants: int = Field(
        default=1, ge=1, le=10_000, description="different tasks used in turn; 1 repeats one task"
    )
    near: int = Field(
        default=2, ge=0, le=1000, description="a wrong checksum at most this far off is a NEAR_MISS"
    )
    max_tokens: int = Field(default=4096, ge=16, le=1_000_000, description="limit of an answer")
    temperature: float = Field(default=0.0, ge=0, le=2, description="sampling temperature")
    top_p: float = Field(default=0.95, gt=0, le=1, description="nucleus sampling")
    sampling_seed: int = Field(default=0, ge=0, description="the request's seed")
    template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="chat_template_kwargs, for example {'enable_thinking': true}",
    )


class Plan(_Part):
    """Everything that decides what is measured; results of different plans do not compare."""

    order: Annotated[str, Field(pattern=r"^[AB]+$")] = Field(
        default="A", description="blocks in time order: A, or ABBA"
    )
    prefill: PrefillPlan | None = Field(default=PrefillPlan(), description="null: not measured")
    decode: DecodePlan | None = Field(default=DecodePlan(), description="null: not measured")
    needle: NeedlePlan | None = Field(default=NeedlePlan(), description="null: not measured")
    cooldown_seconds: float = Field(
        default=0.0, ge=0, le=3600, description="pause before every block but the first"
    )

    def most_connections(self) -> int:
        """Connections that the run may need at once."""
        decode = max(self.decode.concurrency) if self.decode else 1
        return max(decode, self.needle.concurrency if self.needle else 1) + 4


class SingleThresholds(_Part):
    """For one server's own figures."""

    prefill_tok_s_min: dict[str, float] = Field(
        default_factory=dict, description="per prompt length"
    )
    decode_tok_s_min: dict[str, float] = Field(default_factory=dict, description="per concurrency")
    accepted_per_step_min: float | None = Field(
        default=None, description="speculative decoding only"
    )
    needle_exact_min: float | None = Field(default=0.97, description="share of EXACT answers")


class RatioThresholds(_Part):
    """For B over A, and for B minus A of the share of EXACT answers."""

    prefill_ratio_min: float | None = Field(default=0.97, description="prompt tokens/s")
    decode_ratio_min: float | None = Field(
        default=0.97, description="engine steps/s with speculation, else tokens/s"
    )
    accepted_ratio_min: float | None = Field(default=0.95, description="tokens per step")
    needle_difference_min: float | None = Field(
        default=-0.02, description="share of EXACT answers, B minus A"
    )


class GuardThresholds(_Part):
    """How many degenerate answers and faulty requests a run may have, and when an answer counts as a loop."""

    degenerate_max: int = Field(default=0, ge=0, description="empty, repeating, truncated answers")
    faults_max: int = Field(default=0, ge=0, description="requests that failed in any other way")
    loop_cycles: int = Field(
        default=4, ge=2, description="identical cycles at the end of an answer"
    )
    loop_characters: int = Field(
        default=512, ge=8, description="characters that those cycles cover at least"
    )


class Thresholds(_Part):
    """The small file that turns figures into verdicts."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="of all intervals")
    single: SingleThresholds = Field(
        default=SingleThresholds(), description="one server's own figures"
    )
    ratio: RatioThresholds = Field(default=RatioThresholds(), description="B over A")
    guard: GuardThresholds = Field(
        default=GuardThresholds(), description="degenerate answers and failures"
    )
    question: dict[Literal["a4", "csf", "prefetch"], RatioThresholds] = Field(
        default_factory=dict, description="limits that replace ratio for a question"
    )

    @field_validator("question", mode="before")
    @classmethod
    def _inherit(cls, value: Any) -> Any:
        return value or {}

    def ratios(self, question: str | None) -> RatioThresholds:
        """The limits for an A/B that asks *question*; without one the general limits."""
        for name, limits in self.question.items():
            if name == question:
                return limits
        return self.ratio


def load_thresholds(path: Path) -> Thresholds:
    """Read a thresholds file.

    Raises:
        UsageError: unreadable, not TOML, or with unknown keys or wrong values; each is named.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    try:
        return Thresholds.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path}: {explain(error)}") from error


def explain(error: ValidationError, name: Callable[[str], str] = lambda where: where) -> str:
    """A validation error as ``name: what is wrong``, without the library's own decoration.

    *name* turns the dotted place of a value into what the user knows it by.
    """
    lines = []
    for item in error.errors():
        where = name(".".join(str(part) for part in item["loc"]) or "value")
        found = item["input"]
        shown = "" if item["type"] in ("missing", "extra_forbidden") else f" (found {found!r:.80})"
        lines.append(f"{where}: {item['msg'].lower()}{shown}")
    return "; ".join(lines)


_SIZE = re.compile(r"(\d+)([kKmM]?)")


def parse_size(text: str, option: str) -> int:
    """``2048`` or ``2K`` (times 1024) as a number; *option* is named in the error.

    Raises:
        UsageError: anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or len(text) > 18:
        raise UsageError(f"{option}: '{text}' is no number; wanted one such as 2048 or 2K")
    return int(match[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[match[2].lower()]


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """A comma-separated list of sizes; duplicates are an error that names *option*."""
    sizes = tuple(parse_size(part, option) for part in text.split(","))
    if len(set(sizes)) != len(sizes):
        raise UsageError(f"{option}: '{text}' names a value twice")
    return sizes
