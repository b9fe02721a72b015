# SPDX-License-Identifier: Apache-2.0
"""Prefill speed: prompt tokens over the time to the first token, cold, one request at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from b12x_overlay.qualify import metrics
from b12x_overlay.qualify.bodies import generation
from b12x_overlay.qualify.degeneration import check_answers
from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.metrics import Counters, increase
from b12x_overlay.qualify.prompts import Prompt, cold_prompt
from b12x_overlay.qualify.schema import PrefillSample
from b12x_overlay.qualify.session import GIVE_UP_AFTER, Session
from b12x_overlay.qualify.settings import PrefillPlan
from b12x_overlay.qualify.wire import Chunk, Usage

_CACHE_BLOCK = 16
"""Prompt tokens. vLLM's prefix cache answers in whole blocks, on GPUs of 16 tokens or more: fewer are no hit."""


async def measure(session: Session, plan: PrefillPlan) -> None:
    """Fill the block's prefill samples; those that are there already are kept."""
    for length in plan.lengths:
        have = sum(sample.length == length for sample in session.block.prefill)
        if have < plan.repeats:
            await _measure_length(session, plan, length, have)


async def _measure_length(session: Session, plan: PrefillPlan, length: int, have: int) -> None:
    cell = f"prefill {length}"
    if any(stop.cell == cell for stop in session.block.stopped):
        return
    limit = session.server.max_model_len
    if limit is not None and length + plan.answer_tokens > limit:
        await session.give_up(cell, f"the server's context is {limit} tokens")
        return
    answers = _Answers()
    try:
        await _repeat(session, plan, length, have, answers)
    finally:  # also where it was stopped
        try:
            check_answers(answers.texts, answers.tokens, session.guard)
        except Fault as fault:
            session.fault(fault)


@dataclass
class _Answers:
    """What all requests of one length were answered; each is too short to be judged alone."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0


async def _repeat(
    session: Session, plan: PrefillPlan, length: int, have: int, answers: _Answers
) -> None:
    """Send warm-ups and repeats until there are enough samples or nothing but failures."""
    failures = 0
    done = have
    warm = 0
    cell = f"prefill {length}"
    with session.progress.task(cell, plan.repeats, have) as task:
        while done < plan.repeats:
            place = f"warm-up {warm}" if warm < plan.warmups else f"repeat {done}"
            try:
                sample = await _one(session, plan, length, f"{place} try {failures}", answers)
            except Fault as fault:
                session.fault(fault)
                failures += 1
                if failures >= GIVE_UP_AFTER:
                    await session.give_up(
                        cell, f"{failures} requests failed in a row, the last with {fault}"
                    )
                    return
                continue
            failures = 0
            if warm < plan.warmups:
                warm += 1
                continue
            session.block.prefill.append(sample)
            done += 1
            session.save()
            task.advance(f"{sample.tok_s:,.0f} tok/s")


async def _one(
    session: Session, plan: PrefillPlan, length: int, place: str, answers: _Answers
) -> PrefillSample:
    """One cold request, the only one at *place* in its cell; its text goes to *answers*. Raises `Fault`."""
    server = session.server
    chat = not server.abilities.completions
    prompt = await cold_prompt(
        session.client,
        server.model,
        session.prompt_key("prefill", length, place),
        length,
        tokenizer=server.abilities.tokenizer,
        ids=not chat,
    )
    before = await metrics.try_scrape(session.client, server.abilities.metrics)
    path, body = generation(
        server,
        prompt.content,
        chat=chat,
        max_tokens=plan.answer_tokens,
        temperature=0.0,
        seed=0,
        salt=session.salt("prefill", length, place),
        ignore_eos=True,
    )
    seen = _Seen()
    start = time.perf_counter()
    await session.client.stream(path, body, seen.take)
    tokens = _check(seen, prompt, plan.answer_tokens, chat=chat, extras=server.abilities.extras)
    assert seen.first is not None
    ttft = seen.first - start
    answers.texts.append(seen.text)
    answers.tokens += seen.usage.completion if seen.usage and seen.usage.completion else 0
    after = await metrics.try_scrape(session.client, server.abilities.metrics)
    busy = _others(before, after, tokens)
    if busy is False:
        _check_cold(before, after, tokens)
    return PrefillSample(
        length=length,
        prompt_tokens=tokens,
        counted_by=prompt.counted_by,
        ttft_s=ttft,
        tok_s=tokens / ttft,
        busy=busy,
    )


def _others(before: Counters | None, after: Counters | None, tokens: int) -> bool | None:
    """Whether the server had another client's requests beside ours of *tokens*; None where it does not tell."""
    if before is None or before.idle is None:
        return None
    if not before.idle or after is None:
        return not before.idle
    at_end = (after.running or 0) + (after.waiting or 0)  # ours may still be counted
    prompted = increase(before.prompted, after.prompted)
    return at_end > 1 or (prompted is not None and prompted >= tokens + _CACHE_BLOCK)


def _check_cold(before: Counters | None, after: Counters | None, tokens: int) -> None:
    """Raise the `Fault` of a prompt that the prefix cache answered, by the server's counter of such tokens."""
    if before is None or after is None:
        return
    cached = increase(before.cached_prompt, after.cached_prompt)
    if cached is not None and cached >= _CACHE_BLOCK:
        raise Fault(
            FaultKind.CACHED,
            f"{cached:.0f} of {tokens} prompt tokens came from the prefix cache, by the server's counter",
        )


class _Seen:
    """What a prefill request's stream contained."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.text = ""
        self.usage: Usage | None = None
        self.finish: str | None = None

    def take(self, chunk: Chunk) -> None:
        if self.first is None and chunk.has_token:
            self.first = chunk.at
        self.text += chunk.text
        self.usage = chunk.usage or self.usage
        self.finish = chunk.finish or self.finish


def _check(seen: _Seen, prompt: Prompt, wanted: int, *, chat: bool, extras: bool) -> int:
    """The number of prompt tokens, or the `Fault` that makes the request worthless."""
    usage = seen.usage
    if usage is None or usage.prompt is None or usage.completion is None:
        raise Fault(
            FaultKind.NO_USAGE,
            "the stream has no usage statistics with prompt and completion tokens",
        )
    if seen.first is None or usage.completion == 0:
        raise Fault(FaultKind.EMPTY, "no token was generated")
    if usage.completion > wanted:
        raise Fault(
            FaultKind.WRONG_USAGE, f"{usage.completion} tokens stated for max_tokens={wanted}"
        )
    if extras and usage.completion < wanted:
        raise Fault(
            FaultKind.TRUNCATED,
            f"{usage.completion} of {wanted} tokens, finish_reason {seen.finish}",
        )
    if usage.cached:
        raise Fault(
            FaultKind.CACHED,
            f"{usage.cached} of {usage.prompt} prompt tokens came from the prefix cache",
        )
    if prompt.counted_by == "usage":
        return usage.prompt
    # A chat template adds tokens; token ids are taken as they are.
    low, high = prompt.tokens, prompt.tokens + (512 if chat else 0)
    if not low <= usage.prompt <= high:
        raise Fault(
            FaultKind.WRONG_USAGE,
            f"usage says {usage.prompt} prompt tokens, the tokenizer {prompt.tokens}",
        )
    return usage.prompt if chat else prompt.tokens
