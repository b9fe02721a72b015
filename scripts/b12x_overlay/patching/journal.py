# SPDX-License-Identifier: Apache-2.0
"""The journal of a run: what it writes and deletes, so that an interrupted run can be undone or completed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.patching.diff import safe_path
from b12x_overlay.patching.entry import Change, Entry
from b12x_overlay.patching.tree import Tree

JOURNAL = "vllm/.b12x-overlay.journal"
TEMPORARY = ".b12x-overlay.tmp"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a journal left by an interrupted run says."""

    verb: str
    committed: bool

    def __str__(self) -> str:
        way = "complete it" if self.committed else "undo it"
        return f"a run of {self.verb} was interrupted or is still going on; the next apply or revert will {way}"


def unfinished(tree: Tree) -> Unfinished | None:
    """The interrupted (or running) run in *tree*, if any; reads only."""
    journal = read(tree)
    if journal is None:  # or stopped while it wrote its journal for the first time
        begun = os.path.lexists(tree.path(JOURNAL + TEMPORARY))
        return Unfinished("apply or revert", committed=False) if begun else None
    return Unfinished(str(journal["verb"]), journal["state"] == "commit")


def _digest(entry: Entry | None) -> str:
    return "" if entry is None else entry.sha256


def plan(tree: Tree, verb: str, changes: Sequence[Change]) -> dict[str, Any]:
    folders: list[str] = []
    for change in changes:
        if change.new is not None:
            for parent in reversed(Path(change.path).parents[:-1]):
                name = parent.as_posix()
                if name not in folders and not tree.path(name).exists():
                    folders.append(name)
    return {
        "verb": verb,
        "state": "prepare",
        "folders": folders,
        # with the digests before and after, so that a later roll-forward overwrites nothing else
        "write": {c.path: [_digest(c.old), _digest(c.new)] for c in changes if c.new is not None},
        "delete": {c.path: [_digest(c.old)] for c in changes if c.new is None},
    }


def write(tree: Tree, journal: dict[str, Any]) -> None:
    path = tree.path(JOURNAL)
    temporary = tree.path(JOURNAL + TEMPORARY)
    handle = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(journal, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(tree: Tree) -> dict[str, Any] | None:
    found = tree.read(JOURNAL)
    if not isinstance(found, Entry):
        return None
    try:
        journal: dict[str, Any] = json.loads(found.data.decode(errors="surrogateescape"))
        names = [*journal["folders"], *journal["write"], *journal["delete"]]
        if (
            not all(map(safe_path, names))
            or journal["state"] not in ("prepare", "commit")
            or not journal["verb"]
        ):
            raise ValueError("unknown state")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{tree.path(JOURNAL)}, the journal of an interrupted run, is damaged: {error}",
            reason="damaged-journal",
            hint="remove it, then look at scripts/apply-patches status",
        ) from error
    return journal


def drop(tree: Tree) -> None:
    """Last step. File systems keep the order of renames, so one sync here makes all of them last."""
    discard(tree.path(JOURNAL))
    _sync_folder(tree.path(JOURNAL).parent)


def discard(path: Path) -> None:
    """Unlink if there; looks first, because a read-only file system refuses even what is not there."""
    if os.path.lexists(path):
        path.unlink()


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}{TEMPORARY}")


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot; the files themselves are on disk
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
