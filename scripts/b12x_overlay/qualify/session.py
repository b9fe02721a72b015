# SPDX-License-Identifier: Apache-2.0
"""What every measurement of one block shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.errors import ServerError
from b12x_overlay.qualify.faults import Fault
from b12x_overlay.qualify.probe import Server
from b12x_overlay.qualify.progress import Progress
from b12x_overlay.qualify.schema import Block, CellStop, FaultCount
from b12x_overlay.qualify.settings import GuardThresholds

GIVE_UP_AFTER = 5
"""Failures in a row after which a measurement is given up."""


@dataclass(frozen=True)
class Session:
    """One arm's server during one block."""

    client: Client
    server: Server
    block: Block
    guard: GuardThresholds
    run_id: str
    nonce: str
    """Random, new for every invocation."""
    turn: int
    """How many blocks of the same arm come before this one."""
    resumed: bool
    """Whether an earlier invocation has begun the block."""
    progress: Progress
    save: Callable[[], None]
    """Write the result now; called after every sample."""

    def salt(self, *parts: object) -> str:
        """A cache salt for *parts* of this block that no other invocation and no other block ever uses."""
        return "-".join([*self._only_here(), *map(str, parts)])

    def prompt_key(self, *parts: object) -> str:
        """The key of a cold prompt's text.

        The arms' blocks of equal turn have the same keys, so that A and B are compared over equal texts, the salt
        keeping them cold. Where text alone has to do that nobody else has the key: the server knows no salts, or the
        block is resumed, where one that only seems to know them has seen the interrupted request's text.
        """
        alone = self.resumed or not self.server.abilities.extras
        place = self._only_here() if alone else [self.run_id, str(self.turn)]
        return " ".join([*place, *map(str, parts)])

    def _only_here(self) -> list[str]:
        return [self.run_id, self.nonce, self.block.arm, str(self.block.index)]

    def fault(self, fault: Fault) -> None:
        """Count *fault* in the block and save."""
        for known in self.block.faults:
            if known.kind == fault.kind:
                known.count += 1
                break
        else:
            self.block.faults.append(FaultCount(kind=fault.kind, count=1, example=fault.detail))
        self.save()

    async def give_up(self, cell: str, why: str) -> None:
        """Record that a measurement was given up.

        Raises:
            ServerError: the server is gone; then nothing is recorded, so that a resumed run measures it.
        """
        try:
            await self.client.get_json("/v1/models")
        except Fault as fault:
            raise ServerError(
                f"{cell}: {why}; the server does not answer any more ({fault})"
            ) from fault
        self.block.stopped.append(CellStop(cell=cell, why=why))
        self.progress.line(f"{cell}: given up: {why}")
        self.save()
