# SPDX-License-Identifier: Apache-2.0
"""Run the blocks of a plan in order, from wherever a former run stopped."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from b12x_overlay.qualify import decode, metrics, needle_run, prefill, promises
from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.documents import Document
from b12x_overlay.qualify.errors import RefusedError
from b12x_overlay.qualify.identity import differences, gather
from b12x_overlay.qualify.metrics import grown
from b12x_overlay.qualify.probe import Server, probe
from b12x_overlay.qualify.progress import Progress
from b12x_overlay.qualify.restart import Restarter
from b12x_overlay.qualify.schema import Arm, ArmName, Block, Result
from b12x_overlay.qualify.session import Session
from b12x_overlay.qualify.store import Store


@dataclass
class Access:
    """How to reach one arm. None of it goes into the result, except the variables, cleaned."""

    client: Client
    model: str | None
    documents: Sequence[Document] = ()
    """Image manifest, doctor report."""
    log: Path | None = None
    """A local file that the server logs to."""
    restarter: Restarter | None = None
    variables: Mapping[str, str] | None = None
    remove: frozenset[str] = frozenset()


class Runner:
    """One invocation over one result."""

    def __init__(
        self, result: Result, access: Mapping[ArmName, Access], store: Store, progress: Progress
    ) -> None:
        self._result = result
        self._access = access
        self._store = store
        self._progress = progress
        self._nonce = secrets.token_hex(4)
        self._arms: dict[ArmName, Arm] = {arm.name: arm for arm in result.arms}

    async def run(self) -> None:
        """Measure every block that is not done.

        Raises:
            RefusedError, ServerError, BudgetSpentError: what was measured so far is saved.
        """
        self._result.status, self._result.stop = "partial", None
        if not any(access.restarter for access in self._access.values()):
            for name in self._access:  # all addresses are tried before any time is spent
                await self._meet(name)
        first = True
        for block in self._result.blocks:
            if block.done:
                continue
            if not first:
                await asyncio.sleep(self._result.plan.cooldown_seconds)
            first = False
            await self._block(block)
        self._result.status = "complete"

    async def _block(self, block: Block) -> None:
        access = self._access[block.arm]
        self._progress.block(f"{block.arm} {block.index + 1}/{len(self._result.blocks)}")
        resumed = block.started is not None
        block.started = block.started or datetime.now(UTC)
        try:
            if access.restarter:
                await access.restarter.start(
                    f"{block.index + 1}-{block.arm}", access.variables or {}, set(access.remove)
                )
            server = await self._meet(block.arm)
            session = Session(
                client=access.client, server=server, block=block, guard=self._result.thresholds.guard,
                run_id=self._result.run_id, nonce=self._nonce, turn=self._turn(block), resumed=resumed,
                progress=self._progress, save=lambda: self._store.save(self._result),
            )  # fmt: skip
            before = await metrics.try_scrape(access.client, server.abilities.metrics)
            try:
                await self._measure(session)
            finally:
                # Also after a stop: the next run continues the block and adds its own rows.
                after = await asyncio.shield(
                    metrics.try_scrape(access.client, server.abilities.metrics)
                )
                _add_rows(block, before, after)
                self._read_log(block.arm)
            block.done = True
        finally:
            if access.restarter:
                await asyncio.shield(access.restarter.stop())
            self._store.save(self._result, now=True)

    def _turn(self, block: Block) -> int:
        earlier = self._result.blocks[: block.index]
        return sum(other.arm == block.arm for other in earlier)

    async def _measure(self, session: Session) -> None:
        plan = self._result.plan
        if plan.prefill:
            await prefill.measure(session, plan.prefill)
        if plan.decode:
            await decode.measure(session, plan.decode)
        if plan.needle:
            await needle_run.measure(session, plan.needle)

    async def _meet(self, name: ArmName) -> Server:
        """Probe an arm and record or check its identity."""
        access, arm = self._access[name], self._arms[name]
        server = await probe(access.client, access.model)
        identity = await gather(access.client, server, access.documents)
        abilities = server.abilities.as_dict()
        if arm.identity is not None and (changed := differences(arm.identity, identity)):
            raise RefusedError(
                f"the server of {name} is not the one that was measured before:\n  " + "\n  ".join(changed),
                "measure it into a new folder: the same command with another --out",
            )  # fmt: skip
        arm.identity, arm.abilities = identity, abilities
        self._compare_models()
        return server

    def _compare_models(self) -> None:
        """Note it if the arms serve different models: a ratio then says nothing about an image or a variable."""
        models = [arm.identity.model for arm in self._result.arms if arm.identity]
        if len(set(models)) < 2:
            return
        note = f"different models: {' and '.join(models)}"
        if note not in self._result.notes:
            self._result.notes.append(note)
            self._progress.line(note)

    def _read_log(self, name: ArmName) -> None:
        access, arm = self._access[name], self._arms[name]
        path = access.log
        if path is None and access.restarter:
            path = access.restarter.log
        if path is None:
            return
        try:
            promises.note_log(arm, path)
        except OSError as error:
            self._progress.line(f"cannot read the server's log: {error.strerror}")


def _add_rows(
    block: Block, before: metrics.Counters | None, after: metrics.Counters | None
) -> None:
    if before is None or after is None:
        return
    rows = grown(before.a4_rows, after.a4_rows)
    missed = grown(before.a4_missed_rows, after.a4_missed_rows)
    if rows is not None:
        block.a4_rows = (block.a4_rows or 0) + int(rows)
    if missed is not None:
        block.a4_missed_rows = (block.a4_missed_rows or 0) + int(missed)
