# SPDX-License-Identifier: Apache-2.0
"""The load that one run may put on a server: requests and minutes."""

from __future__ import annotations

import time

from b12x_overlay.qualify.faults import BudgetSpentError


class Budget:
    """Counts generation requests and wall time of this invocation."""

    def __init__(self, requests: int, seconds: float) -> None:
        self.requests = requests
        self.seconds = seconds
        self.used = 0
        self._start = time.monotonic()

    def take(self) -> None:
        """Account for one request about to be sent.

        Raises:
            BudgetSpentError: the limit of requests or time is reached; the request must not be sent.
        """
        if self.used >= self.requests:
            raise BudgetSpentError(
                f"the limit of {self.requests} requests is reached (--max-requests)"
            )
        if time.monotonic() - self._start > self.seconds:
            raise BudgetSpentError(
                f"the limit of {self.seconds / 60:g} minutes is reached (--max-minutes)"
            )
        self.used += 1
