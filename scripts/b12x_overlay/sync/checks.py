# SPDX-License-Identifier: Apache-2.0
"""What must hold for the synced tree before beta may get it: fragments in order, patches exact."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from b12x_overlay.changes.checking import check_entries
from b12x_overlay.changes.model import plain
from b12x_overlay.changes.reading import read_folder
from b12x_overlay.changes.receipts import Receipt
from b12x_overlay.changes.rules import patchset_fragments
from b12x_overlay.console import CommandError
from b12x_overlay.git import Git, environment
from b12x_overlay.lines import Lines
from b12x_overlay.paths import build_dir
from b12x_overlay.sync.held import Held, read_tree

_APPLY = Path("scripts/apply-patches")


def check_fragments(work: Git, lines: Lines, receipt: Receipt | None) -> str:
    """Check the fragments of the synced tree; returns what was found in order.

    Raises:
        CommandError: faults, each named.
    """
    folder = work.folder / lines.folder
    if not folder.is_dir():
        return f"no {lines.folder}/ in this tree"
    patchset = work.folder / lines.patchset
    patches = None
    if patchset.is_file():
        try:
            patches = lines.patchset, patchset_fragments(patchset)
        except ValueError as error:
            raise _failed("patchset", f"{lines.patchset}: {error}") from error
    report = check_entries(
        read_folder(folder), lines.component, patches=patches, receipt=receipt,
        old_bytes=lambda blob: next(work.blobs([blob])),
    )  # fmt: skip
    if report.faults:
        told = [
            f"  {fault.file}: {fault.path}: {plain(fault.what)}; {plain(fault.fix)}"
            for fault in report.faults
        ]
        raise _failed("fragments", "the synced tree's fragments have faults:\n" + "\n".join(told))
    count = len(report.fragments)
    return f"{count} fragment{'' if count == 1 else 's'} in order"


def check_held(work: Git, held: Held, beta: str) -> None:
    """Make sure that no held path changed on the way, by whatever road (a rename, a merge).

    Raises:
        CommandError: one did.
    """
    before, after = read_tree(work, beta), read_tree(work, "HEAD")
    changed = [
        path
        for path in held.among(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
    if changed:
        raise _failed(
            "held",
            "beta's version of these files must stay, but the picks changed them: "
            + ", ".join(changed),
        )


def check_patches(work: Git, lines: Lines) -> str:
    """Apply the synced tree's patch series to its pin, with its own command, in a folder of its own.

    Raises:
        CommandError: the series does not apply exactly, or the pinned sources cannot be had.
    """
    if not (work.folder / lines.patchset).is_file():
        return f"no {lines.patchset} in this tree"
    if not (work.folder / _APPLY).is_file():
        raise _failed(
            "patches", f"the synced tree has {lines.patchset} but no {_APPLY} to check it with"
        )
    with tempfile.TemporaryDirectory(prefix="sync-beta-patches-") as scratch:
        build = Path(scratch)
        _lend_downloads(build)
        done = subprocess.run(
            [sys.executable, str(work.folder / _APPLY), "apply"], cwd=work.folder, capture_output=True, text=True,
            check=False, stdin=subprocess.DEVNULL,
            env={**environment(), "B12X_OVERLAY_BUILD": scratch, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        _keep_downloads(build)
    if done.returncode != 0:
        told = (done.stdout + done.stderr).strip()[-2000:]
        raise _failed(
            "patches", f"{_APPLY} of the synced tree ended with {done.returncode}:\n{told}"
        )
    return f"the series of {lines.patchset} applies exactly"


def _lend_downloads(build: Path) -> None:
    (build / "sources").mkdir()
    for archive in sorted((build_dir() / "sources").glob("*.tar.gz")):
        (build / "sources" / archive.name).symlink_to(archive)
    if (build_dir() / "venvs").is_dir():
        (build / "venvs").symlink_to(build_dir() / "venvs")


def _keep_downloads(build: Path) -> None:
    """What the check had to fetch serves the next one."""
    for archive in (build / "sources").glob("*.tar.gz"):
        if not archive.is_symlink():
            target = build_dir() / "sources" / archive.name
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.move(archive, partial)
            partial.replace(target)


def _failed(reason: str, what: str) -> CommandError:
    return CommandError(
        f"{what}\nnothing was changed",
        reason=reason,
        hint="correct it on canonical and run it again",
    )
