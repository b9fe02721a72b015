# SPDX-License-Identifier: Apache-2.0
"""Measure: from checked options to a result, whatever stops the run in between."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.qualify.budget import Budget
from b12x_overlay.qualify.client import Client, Timeouts
from b12x_overlay.qualify.errors import RefusedError, ServerError
from b12x_overlay.qualify.faults import BudgetSpentError
from b12x_overlay.qualify.progress import Progress
from b12x_overlay.qualify.redact import redact
from b12x_overlay.qualify.restart import Restarter
from b12x_overlay.qualify.runner import Access, Runner
from b12x_overlay.qualify.schema import ArmName, Result
from b12x_overlay.qualify.sides import Side, restart_command
from b12x_overlay.qualify.store import Store


@dataclass(frozen=True)
class Stop:
    """Why a run is not whole."""

    code: ExitCode
    why: str
    """For the terminal; the result has it redacted."""
    hint: str = ""
    """What to do instead of going on with the same command."""


def measure(
    options: argparse.Namespace,
    sides: list[Side],
    connect: Callable[[Side, Budget, Timeouts], Client],
    result: Result,
    store: Store,
    progress: Progress,
) -> Stop | None:
    """Run what is open in *result*; None when it is whole.

    Raises:
        RefusedError, ServerError: the server cannot be measured, and nothing has been.
    """
    try:
        asyncio.run(_drive(options, sides, connect, result, store, progress))
    except KeyboardInterrupt:
        result.stop = "interrupted"
        return Stop(ExitCode.INTERRUPTED, result.stop)
    except BudgetSpentError as spent:
        result.stop = str(spent)
        return Stop(ExitCode.DIFFERENT, result.stop)
    except (RefusedError, ServerError) as error:
        if not any(block.started for block in result.blocks):
            raise
        result.stop = redact(str(error))
        return Stop(error.code, str(error) + error.detail, error.hint)
    return None


async def _drive(
    options: argparse.Namespace,
    sides: list[Side],
    connect: Callable[[Side, Budget, Timeouts], Client],
    result: Result,
    store: Store,
    progress: Progress,
) -> None:
    """Open the connections and run. A termination signal is taken like Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    budget = Budget(options.max_requests, options.max_minutes * 60)
    timeouts = Timeouts(stall=options.stall_timeout, request=options.request_timeout)
    names = {name for side in sides for name in side.environment}
    access: dict[ArmName, Access] = {}
    try:
        async with budget.limited(), AsyncExitStack() as stack:
            for side in sides:
                client = await stack.enter_async_context(connect(side, budget, timeouts))
                access[side.name] = Access(
                    client=client,
                    model=side.model,
                    documents=side.documents,
                    log=side.log,
                    restarter=_restarter(options, client, store, progress),
                    variables=side.environment,
                    remove=frozenset(names - set(side.environment)),
                )
            with progress:
                await Runner(result, access, store, progress).run()
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise


def _restarter(
    options: argparse.Namespace, client: Client, store: Store, progress: Progress
) -> Restarter | None:
    command = getattr(options, "restart", None)
    if command is None:
        return None
    logs = store.folder / "server-logs"
    return Restarter(restart_command(command), client, logs, options.restart_timeout, progress)
