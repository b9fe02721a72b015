# SPDX-License-Identifier: Apache-2.0
"""A fixed number of streams that are always busy, and the count of what they yield inside a window."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from b12x_overlay.qualify.bodies import generation
from b12x_overlay.qualify.degeneration import FIRST_TEXT, TAIL, check_answer
from b12x_overlay.qualify.faults import BudgetSpentError, Fault, FaultKind
from b12x_overlay.qualify.prompts import story
from b12x_overlay.qualify.session import GIVE_UP_AFTER, Session
from b12x_overlay.qualify.settings import DecodePlan
from b12x_overlay.qualify.wire import Chunk


@dataclass
class Tally:
    """What happened inside one window."""

    tokens: int = 0
    restarts: int = 0
    longest_gap: float = 0.0
    active: set[int] = field(default_factory=set)
    """Streams that got a token."""
    faults: list[Fault] = field(default_factory=list)


class GiveUpError(Exception):
    """No valid measurement is possible; what led to it is counted already."""


class Load:
    """*size* streams; use as an async context manager, which ends them."""

    def __init__(self, session: Session, plan: DecodePlan, size: int) -> None:
        self.size = size
        self._session = session
        self._plan = plan
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[int] = set()
        self._window: Tally | None = None
        self._spent: BudgetSpentError | None = None
        self._stuck: dict[int, Fault] = {}
        self.failing: dict[int, Fault] = {}
        """Streams whose last answer broke and whose next one has had no token yet."""
        self.broken = asyncio.Event()
        """Set when a stream breaks inside a window."""

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep_busy(number)) for number in range(self.size)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def running(self) -> int:
        """Streams whose present answer has had a token and no end."""
        return len(self._running)

    def begin(self) -> Tally:
        """Start counting."""
        self.broken.clear()
        self._window = Tally()
        return self._window

    def end(self) -> None:
        """Stop counting."""
        self._window = None

    def check(self) -> None:
        """Raise what keeps a stream from running for good.

        Raises:
            BudgetSpentError: the limit of requests or minutes.
            GiveUpError: a stream failed several times in a row.
        """
        if self._spent:
            raise self._spent
        for number, fault in self._stuck.items():
            raise GiveUpError(f"stream {number} failed {GIVE_UP_AFTER} times in a row: {fault}")
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    async def _keep_busy(self, number: int) -> None:
        """One stream: answer after answer until cancelled."""
        failures = 0
        turn = 0
        while failures < GIVE_UP_AFTER:
            answer = _Answer(self, number)
            try:
                await self._one_answer(number, turn, answer)
                failures = 0
            except BudgetSpentError as spent:
                self._spent = spent
                self.broken.set()
                return
            except Fault as fault:
                self._session.fault(fault)
                if fault.kind != FaultKind.REPETITION:  # a loop is bad text at an honest speed
                    failures += 1
                    self._break(number, fault)
                    if failures >= GIVE_UP_AFTER:
                        self._stuck[number] = fault
                        return
                    await asyncio.sleep(0.05 * 2**failures)  # a broken server is not hammered
            except asyncio.CancelledError:
                answer.cut_off(self._plan, self._session)
                raise
            finally:
                self._running.discard(number)
            turn += 1
            if self._window is not None:
                self._window.restarts += 1

    def _break(self, number: int, fault: Fault) -> None:
        self.failing[number] = fault
        if self._window is not None:
            self._window.faults.append(fault)
            self.broken.set()

    async def _one_answer(self, number: int, turn: int, answer: _Answer) -> None:
        session, plan = self._session, self._plan
        # The same text in every block, so that both arms decode the same answers; the salt differs.
        key = f"decode {self.size} {number} {turn}"
        path, body = generation(
            session.server,
            story(key),
            chat=session.server.abilities.chat,
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            seed=number + 1000 * turn,
            salt=session.salt(key),
            ignore_eos=plan.ignore_eos,
        )
        await session.client.stream(path, body, answer.take)
        answer.finish(plan, session)


class _Answer:
    """The usage statistics and the end of the text of one streamed answer."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._number = number
        self._tokens = 0
        self._usage_seen = False
        self._last = time.perf_counter()
        self._text = ""
        self._finish: str | None = None

    def take(self, chunk: Chunk) -> None:
        """Count one event. Raises `Fault` for usage statistics that go backwards or are missing."""
        window = self._load._window
        gap, self._last = chunk.at - self._last, chunk.at
        if window is not None and self._tokens:
            window.longest_gap = max(window.longest_gap, gap)
        if chunk.text:
            self._text = (
                (self._text + chunk.text)[-TAIL:]
                if len(self._text) > 2 * TAIL
                else self._text + chunk.text
            )
        self._finish = chunk.finish or self._finish
        if chunk.usage is None or chunk.usage.completion is None:
            if chunk.text and not self._usage_seen:
                raise Fault(
                    FaultKind.NO_USAGE,
                    "the stream has text without continuous usage statistics to count tokens from",
                )
            return
        self._usage_seen = True
        new = chunk.usage.completion - self._tokens
        if new < 0:
            raise Fault(
                FaultKind.WRONG_USAGE,
                f"completion_tokens went back from {self._tokens} to {chunk.usage.completion}",
            )
        self._tokens = chunk.usage.completion
        if new:
            self._load._running.add(self._number)
            self._load.failing.pop(self._number, None)
            if window is not None:
                window.tokens += new
                window.active.add(self._number)
        # What follows is bookkeeping, while another request may have its place already.
        if chunk.finish is not None:
            self._load._running.discard(self._number)

    def finish(self, plan: DecodePlan, session: Session) -> None:
        """Judge a whole answer. Raises `Fault`."""
        if self._tokens > plan.max_tokens:
            raise Fault(
                FaultKind.WRONG_USAGE,
                f"{self._tokens} tokens stated for max_tokens={plan.max_tokens}",
            )
        self._judge(plan, session)
        if (
            self._finish == "length"
            and self._tokens < plan.max_tokens
            and session.server.abilities.extras
        ):
            raise Fault(
                FaultKind.TRUNCATED,
                f"finish_reason length after {self._tokens} of {plan.max_tokens} tokens",
            )

    def cut_off(self, plan: DecodePlan, session: Session) -> None:
        """Judge an answer that was cut off because the measurement ended, if it was long enough to have text."""
        if self._tokens >= FIRST_TEXT:
            try:
                self._judge(plan, session)
            except Fault as fault:
                session.fault(fault)

    def _judge(self, plan: DecodePlan, session: Session) -> None:
        if not plan.ignore_eos:  # past its end, even a sound model's text means nothing
            check_answer(self._text, self._tokens, session.guard)
