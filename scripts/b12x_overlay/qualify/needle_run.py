# SPDX-License-Identifier: Apache-2.0
"""Run the needle task many times at a fixed concurrency."""

from __future__ import annotations

import asyncio
from typing import Any

from b12x_overlay.qualify.degeneration import check_answer
from b12x_overlay.qualify.errors import ServerError
from b12x_overlay.qualify.faults import BudgetSpentError, Fault, FaultKind
from b12x_overlay.qualify.needle import NeedleTask, make_task
from b12x_overlay.qualify.progress import Task
from b12x_overlay.qualify.schema import NeedleAnswer, NeedleOutcome, NeedleRun
from b12x_overlay.qualify.scoring import answer_text, score
from b12x_overlay.qualify.session import Session
from b12x_overlay.qualify.settings import NeedlePlan
from b12x_overlay.qualify.wire import parse_usage

_GIVE_UP_AFTER = 10
"""Failed requests in a row (in order of completion) after which a run is given up."""


async def measure(session: Session, plan: NeedlePlan) -> None:
    """Fill the block's needle runs; answers that are there already are kept."""
    if not session.server.abilities.chat:
        if not session.block.stopped or all(
            stop.cell != "needle" for stop in session.block.stopped
        ):
            await session.give_up("needle", "the server has no chat interface")
        return
    tasks = [make_task(plan, variant) for variant in range(plan.variants)]
    for number in range(plan.runs):
        cell = f"needle run {number + 1}"
        if any(stop.cell == cell for stop in session.block.stopped):
            continue
        run = next((run for run in session.block.needle if run.run == number), None)
        if run is None:
            run = NeedleRun(run=number)
            session.block.needle.append(run)
        with session.progress.task(cell, plan.requests, len(run.answers)) as progress:
            await _Run(session, plan, tasks, run, progress).go(cell)


class _Run:
    """Workers that take the open request numbers of one run."""

    def __init__(
        self,
        session: Session,
        plan: NeedlePlan,
        tasks: list[NeedleTask],
        run: NeedleRun,
        progress: Task,
    ) -> None:
        self._session = session
        self._plan = plan
        self._tasks = tasks
        self._run = run
        self._progress = progress
        done = {answer.index for answer in run.answers}
        self._open = iter([index for index in range(plan.requests) if index not in done])
        self._errors_in_a_row = 0
        self._last: Fault | None = None

    async def go(self, cell: str) -> None:
        """Send what is open. Raises `BudgetSpentError`."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.concurrency):
                    group.create_task(self._work())
        except* BudgetSpentError as spent:
            raise spent.exceptions[0] from None
        finally:
            self._run.answers.sort(key=lambda answer: answer.index)
            self._session.save()
        if self._errors_in_a_row >= _GIVE_UP_AFTER:
            why = f"{self._errors_in_a_row} requests failed in a row, the last with {self._last}"
            try:
                await self._session.give_up(cell, why)
            except (
                ServerError
            ):  # they are no answers of the server that will be there when the run is resumed
                self._run.answers = [
                    a for a in self._run.answers if a.outcome != NeedleOutcome.ERROR
                ]
                raise

    async def _work(self) -> None:
        for index in self._open:
            if self._errors_in_a_row >= _GIVE_UP_AFTER:
                return
            outcome, why = await self._one(index)
            self._run.answers.append(NeedleAnswer(index=index, outcome=outcome, why=why))
            self._session.save()
            exact = sum(answer.outcome == NeedleOutcome.EXACT for answer in self._run.answers)
            self._progress.advance(f"{exact} exact of {len(self._run.answers)}")

    async def _one(self, index: int) -> tuple[NeedleOutcome, str | None]:
        task = self._tasks[index % len(self._tasks)]
        try:
            answer = await self._session.client.post_json(
                "/v1/chat/completions", self._body(task, index)
            )
            outcome, why = score(answer, task, self._plan.near)
            self._usage(answer)
        except Fault as fault:
            self._session.fault(fault)
            self._errors_in_a_row += 1
            self._last = fault
            return NeedleOutcome.ERROR, str(fault)
        self._errors_in_a_row = 0
        self._guard(answer, outcome)
        return outcome, why

    def _guard(self, answer: dict[str, Any], outcome: NeedleOutcome) -> None:
        """Count a degenerate answer; it stays scored."""
        if outcome == NeedleOutcome.TRUNC:
            self._session.fault(
                Fault(
                    FaultKind.TRUNCATED, f"a needle answer reached {self._plan.max_tokens} tokens"
                )
            )
        try:
            check_answer(answer_text(answer), None, self._session.guard)
        except Fault as fault:
            self._session.fault(fault)

    def _usage(self, answer: dict[str, Any]) -> None:
        usage = parse_usage(answer.get("usage"))
        if usage is None:
            return
        if usage.completion is not None and usage.completion > self._plan.max_tokens:
            raise Fault(
                FaultKind.WRONG_USAGE,
                f"{usage.completion} tokens stated for max_tokens={self._plan.max_tokens}",
            )
        self._run.prompt_tokens = self._run.prompt_tokens or usage.prompt

    def _body(self, task: NeedleTask, index: int) -> dict[str, Any]:
        plan = self._plan
        body: dict[str, Any] = {
            "model": self._session.server.model,
            "messages": task.messages(),
            "tools": [task.tool()],
            "tool_choice": "auto",
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "seed": plan.sampling_seed,
            "max_tokens": plan.max_tokens,
        }
        if plan.template_options:
            body["chat_template_kwargs"] = plan.template_options
        if self._session.server.abilities.extras:
            # All prompts are alike: with one salt the cache would give one prefill, and its rounding, to all answers.
            part = (index,) if plan.salt == "request" else ()
            body["cache_salt"] = self._session.salt("needle", self._run.run, *part)
        return body
