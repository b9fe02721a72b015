# SPDX-License-Identifier: Apache-2.0
"""Restart the server under test with other environment variables, and prove that it is a new one.

The given command is run before every block. One that ends with status 0 must have replaced the server (``docker
compose up -d --force-recreate``, ``systemctl restart``); one that keeps running is the server itself and is stopped
after the block. Either way the block starts only when the address answers *and* it is a new process: it states another
start time in /metrics or, where that cannot be read before and after, nothing listened there before or in between. An
answer that is an error, or none in time, is no proof: a busy server gives it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.qualify import metrics
from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.errors import ServerError
from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.progress import Progress

_POLL_SECONDS = 0.25
_TERM_SECONDS = 60.0
_DOWN = frozenset({FaultKind.CONNECT, FaultKind.DISCONNECT})
"""Nothing listens, or only a forwarding proxy without a server behind it."""


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
        before = await self._look()
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
        seen_down = before.down
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            code = self._process.returncode
            if code not in (None, 0):
                raise self._error(f"the command ended with status {code}")
            now = await self._look()
            seen_down = seen_down or now.down
            if now.up and now.is_new(before, seen_down):
                return
            await asyncio.sleep(_POLL_SECONDS)
        if seen_down and not now.up:
            raise self._error(f"no server answered within {self._timeout:g} s (--restart-timeout)")
        raise self._error(
            f"the old server went on answering for {self._timeout:g} s: the command does not replace it"
        )

    async def stop(self) -> None:
        """Stop the server if the command is the server; wait until it is gone.

        The command may be a script around the server: all of its process group counts, not only the script.
        """
        process = self._process
        self._process = None
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            deadline = time.monotonic() + _TERM_SECONDS
            while time.monotonic() < deadline:
                if process.returncode is not None and not _group_runs(process.pid):
                    return
                await asyncio.sleep(_POLL_SECONDS)

    async def _look(self) -> _Seen:
        try:
            await self._client.get_json("/v1/models", timeout=5)
        except Fault as fault:
            return _Seen(up=False, down=fault.kind in _DOWN)
        counters = await metrics.try_scrape(self._client, available=True)
        return _Seen(up=True, down=False, started=counters.started if counters else None)

    def _error(self, message: str) -> ServerError:
        """*message*, and for the terminal alone the file with what the command printed, and its end."""
        lines: list[str] = []
        if self.log is not None:
            with contextlib.suppress(OSError):
                lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        tail = "".join(f"\n  | {line[:200]}" for line in lines)
        return ServerError(message, detail=f"; its output is in {self.log}{tail}")


@dataclass(frozen=True)
class _Seen:
    """What the address said."""

    up: bool
    down: bool
    """Certainly no server there."""
    started: float | None = None
    """The start time that the server states."""

    def is_new(self, before: _Seen, seen_down: bool) -> bool:
        if self.started is not None and before.started is not None:
            return self.started != before.started
        return seen_down


def _group_runs(group: int) -> bool:
    """Whether a process of *group* runs. Dead ones that nobody has collected do not count, where /proc tells."""
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    for stat in stats:
        with contextlib.suppress(OSError, IndexError, ValueError):
            # pid (name) state ppid pgrp …; the name may hold anything
            state, _, member_of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in "ZX":
                return True
    if stats:
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
