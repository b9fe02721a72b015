# SPDX-License-Identifier: Apache-2.0
"""Decode speed: output tokens per second while a fixed number of streams is always busy.

All streams are started, an uncounted time follows the moment when all run at once, then windows follow one another
without a pause. A stream whose answer ends starts another at once. That the server really runs them all is read from
its gauges at a window's two ends or, without metrics, from the streams. Tokens are counted from each stream's continuous
usage statistics, engine steps and accepted draft tokens from the server's metrics at the window's two ends, so that
a change of acceptance can be told from a change of speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from b12x_overlay.qualify import metrics
from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.metrics import Counters, increase
from b12x_overlay.qualify.schema import DecodeSample
from b12x_overlay.qualify.session import GIVE_UP_AFTER, Session
from b12x_overlay.qualify.settings import DecodePlan
from b12x_overlay.qualify.stream_tally import GiveUpError, Load, Tally

_DRAIN_SECONDS = 30.0
_LOOK_SECONDS = 1.0
"""How long to look for a moment in which all streams run: an ended answer is replaced sooner, a limit lasts."""
_POLL_SECONDS = 0.02


async def measure(session: Session, plan: DecodePlan) -> None:
    """Fill the block's decode samples; those that are there already are kept."""
    for streams in plan.concurrency:
        have = sum(sample.concurrency == streams for sample in session.block.decode)
        cell = f"decode C{streams}"
        if have >= plan.windows or any(stop.cell == cell for stop in session.block.stopped):
            continue
        try:
            await _measure_concurrency(session, plan, streams, have)
        except GiveUpError as reason:
            await session.give_up(cell, str(reason))
        await _drain(session)


async def _measure_concurrency(session: Session, plan: DecodePlan, streams: int, have: int) -> None:
    """Run the load and take windows. Raises `GiveUpError` where no valid window is possible."""
    failures = 0
    ready = False
    with session.progress.task(f"decode C{streams}", plan.windows, have) as task:
        async with Load(session, plan, streams) as load:
            while have < plan.windows:
                if not ready:
                    await _ramp(session, load, plan)
                try:
                    sample = await _window(session, plan, load)
                except Fault as fault:
                    session.fault(fault)
                    ready = False
                    failures += 1
                    if failures >= GIVE_UP_AFTER:
                        raise GiveUpError(str(fault)) from fault
                    continue
                ready = True
                have += 1
                session.block.decode.append(sample)
                session.save()
                task.advance(f"{sample.tok_s:,.1f} tok/s")


async def _ramp(session: Session, load: Load, plan: DecodePlan) -> None:
    """Wait until all streams run at once. Raises `GiveUpError` after ``ramp_seconds``."""
    deadline = time.perf_counter() + plan.ramp_seconds
    most = 0
    while (running := load.running()) < load.size:
        load.check()
        most = max(most, running)
        if time.perf_counter() > deadline:
            fault = Fault(
                FaultKind.NOT_SATURATED,
                f"{most} of {load.size} streams ran at once in {plan.ramp_seconds:g} s; "
                "is the server's --max-num-seqs lower, or is it busy?",
            )
            session.fault(fault)
            raise GiveUpError(str(fault))
        await asyncio.sleep(_POLL_SECONDS)
    await asyncio.sleep(plan.settle_seconds)


async def _window(session: Session, plan: DecodePlan, load: Load) -> DecodeSample:
    """One window. Raises `Fault` if it is not what it claims to be."""
    available = session.server.abilities.metrics
    before, full = await _look(session, load)
    cpu = time.process_time()
    tally = load.begin()
    start = time.perf_counter()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(load.broken.wait(), plan.window_seconds)
    seconds = time.perf_counter() - start
    load.end()
    cpu = time.process_time() - cpu
    after = await metrics.try_scrape(session.client, available)
    if not full and not tally.faults:
        _, full = await _look(session, load)
    load.check()
    _check(tally, load, before, after, seconds)
    if not full:
        raise Fault(FaultKind.NOT_SATURATED, _shortfall(load, after))
    return _sample(tally, load.size, seconds, cpu, before, after)


async def _look(session: Session, load: Load) -> tuple[Counters | None, bool]:
    """The counters, and whether all streams run; returns as soon as they do, else after `_LOOK_SECONDS`."""
    deadline = time.perf_counter() + _LOOK_SECONDS
    while True:
        counters = await metrics.try_scrape(session.client, session.server.abilities.metrics)
        full = _all_run(load, counters)
        if full or time.perf_counter() > deadline:
            return counters, full
        await asyncio.sleep(_POLL_SECONDS)


def _all_run(load: Load, counters: Counters | None) -> bool:
    if counters is None or counters.running is None:
        return load.running() == load.size
    return counters.running >= load.size and not counters.waiting


def _shortfall(load: Load, counters: Counters | None) -> str:
    if counters is None or counters.running is None:
        seen = f"{load.running()} streams ran"
    else:
        seen = f"{counters.running:.0f} requests ran and {counters.waiting or 0:.0f} waited on the server"
    return (
        f"{seen} at the window's end, and at its start not all {load.size} streams ran either; "
        "is the server's --max-num-seqs lower, or is it busy?"
    )


def _sample(
    tally: Tally,
    streams: int,
    seconds: float,
    cpu: float,
    before: Counters | None,
    after: Counters | None,
) -> DecodeSample:
    sample = DecodeSample(
        concurrency=streams,
        seconds=seconds,
        tokens=tally.tokens,
        tok_s=tally.tokens / seconds,
        answers_restarted=tally.restarts,
        longest_gap_s=tally.longest_gap,
        client_busy=cpu / seconds,
    )
    if before is None or after is None:
        return sample
    steps = increase(before.steps, after.steps)
    if steps:
        sample.steps = int(steps)
        sample.steps_s = steps / (after.at - before.at)
    generated = increase(before.generated, after.generated)
    sample.server_tok_s = None if generated is None else generated / (after.at - before.at)
    drafts = increase(before.drafts, after.drafts)
    accepted = increase(before.accepted, after.accepted)
    if drafts is not None and steps and generated:
        sample.accepted_per_step = generated / (steps * streams)
    if drafts and accepted is not None:
        sample.accepted_per_draft = 1 + accepted / drafts
    sample.running = after.running
    return sample


def _check(
    tally: Tally, load: Load, before: Counters | None, after: Counters | None, seconds: float
) -> None:
    broken = tally.faults + list(load.failing.values())
    if broken:
        kinds = ", ".join(sorted({fault.kind.value for fault in broken}))
        raise Fault(FaultKind.NOT_SATURATED, f"streams broke ({kinds}): the window does not count")
    if tally.tokens == 0:
        raise Fault(FaultKind.STALL, f"no stream got a token in {seconds:.1f} s")
    silent = load.size - len(tally.active)
    if silent:
        raise Fault(
            FaultKind.NOT_SATURATED,
            f"{silent} of {load.size} streams got no token in {seconds:.1f} s",
        )
    if before is None or after is None:
        return
    generated = increase(before.generated, after.generated)
    if generated is None:
        return
    if after.running is not None and after.running > load.size:
        raise Fault(
            FaultKind.NOT_SATURATED,
            f"{after.running:.0f} requests ran on the server, {load.size} of them ours: other clients are at work",
        )
    # Wide, because a busy machine reads events late and the counters' time is as blurred as their request took.
    rate = tally.tokens / seconds
    expected = rate * (after.at - before.at)
    slack = 0.25 * expected + 16 * load.size + rate * (before.took + after.took)
    if abs(generated - expected) > slack:
        raise Fault(
            FaultKind.WRONG_USAGE,
            f"the streams' usage says {tally.tokens} tokens, the server's counter {generated:.0f}: "
            "usage is wrong, or other clients are at work",
        )


async def _drain(session: Session) -> None:
    """Wait until the server has dropped the aborted streams, so that the next measurement starts idle."""
    deadline = time.perf_counter() + _DRAIN_SECONDS
    while time.perf_counter() < deadline:
        counters = await metrics.try_scrape(session.client, session.server.abilities.metrics)
        if counters is None or counters.idle in (None, True):
            return
        await asyncio.sleep(0.2)
