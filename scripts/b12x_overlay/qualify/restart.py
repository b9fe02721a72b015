# SPDX-License-Identifier: Apache-2.0
"""Restart the server under test with other environment variables, and prove that it is a new one.

The given command is run before every block. One that ends with status 0 must have replaced the server (``docker
compose up -d --force-recreate``, ``systemctl restart``); one that keeps running is the server itself and is stopped
after the block. Either way the block starts only when the address answers *and* it is a new process: it did not answer
before, was seen down in between, or states another start time in /metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from b12x_overlay.qualify import metrics
from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.errors import ServerError
from b12x_overlay.qualify.faults import Fault
from b12x_overlay.qualify.progress import Progress

_POLL_SECONDS = 0.25
_TERM_SECONDS = 60.0


class Restarter:
    """Runs one command; use `stop` when the block is over."""

    def __init__(
        self,
        command: Sequence[str],
        client: Client,
        logs: Path,
        timeout: float,
        progress: Progress,
    ) -> None:
        self._command = command
        self._client = client
        self._logs = logs
        self._timeout = timeout
        self._progress = progress
        self._process: asyncio.subprocess.Process | None = None
        self.log: Path | None = None
        """What the command of the present block printed."""

    async def start(self, name: str, variables: Mapping[str, str], remove: set[str]) -> None:
        """Run the command with *variables* set and *remove* unset; return when a new server answers.

        Raises:
            ServerError: the command fails, or no new server answers in time.
        """
        up_before, started_before = await self._look()
        self._logs.mkdir(parents=True, exist_ok=True)
        self.log = self._logs / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if key not in remove} | dict(
            variables
        )
        self._progress.line(f"restarting: {shlex.join(self._command)}")
        with self.log.open("wb") as output:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ServerError(f"cannot run {self._command[0]}: {error.strerror}") from error
        fresh = not up_before
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            code = self._process.returncode
            if code not in (None, 0):
                raise ServerError(
                    f"the command ended with status {code}; its output is in {self.log}{self._tail()}"
                )
            up, started = await self._look()
            fresh = (
                fresh
                or not up
                or (
                    started is not None and started_before is not None and started != started_before
                )
            )
            if up and fresh:
                return
            await asyncio.sleep(_POLL_SECONDS)
        if fresh:
            raise ServerError(
                f"no server answered within {self._timeout:g} s (--restart-timeout){self._tail()}"
            )
        raise ServerError(
            f"the old server went on answering for {self._timeout:g} s: the command does not replace it{self._tail()}"
        )

    async def stop(self) -> None:
        """Stop the server if the command is the server; wait until it is gone."""
        process = self._process
        self._process = None
        if process is None or process.returncode is not None:
            return
        for number, patience in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _TERM_SECONDS)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
                return

    async def _look(self) -> tuple[bool, float | None]:
        """Whether the address answers, and the start time it states."""
        try:
            await self._client.get_json("/v1/models", timeout=5)
        except Fault:
            return False, None
        counters = await metrics.try_scrape(self._client, available=True)
        return True, counters.started if counters else None

    def _tail(self) -> str:
        """The last lines that the command printed, for the terminal only."""
        if self.log is None:
            return ""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            return "".join(f"\n  | {line[:200]}" for line in lines)
        return ""
