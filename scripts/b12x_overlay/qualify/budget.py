# SPDX-License-Identifier: Apache-2.0
"""The load that one run may put on a server: requests and minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from b12x_overlay.qualify.faults import BudgetSpentError


class Budget:
    """Counts generation requests and bounds the time of this invocation."""

    def __init__(self, requests: int, seconds: float) -> None:
        self.requests = requests
        self.seconds = seconds
        self.used = 0

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Bound what runs inside: at the limit every wait in it ends as with Ctrl-C, be it for an answer, the end of a
        window, a restarted server or a pause.

        Raises:
            BudgetSpentError: the limit of time was reached.
        """
        try:
            async with asyncio.timeout(self.seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BudgetSpentError(
                f"the limit of {self.seconds / 60:g} minutes is reached (--max-minutes)"
            ) from error

    def take(self) -> None:
        """Account for one request about to be sent.

        Raises:
            BudgetSpentError: the limit of requests is reached; the request must not be sent.
        """
        if self.used >= self.requests:
            raise BudgetSpentError(
                f"the limit of {self.requests} requests is reached (--max-requests)"
            )
        self.used += 1
