# SPDX-License-Identifier: Apache-2.0
"""Paths that a sync never changes on beta: version pins that beta keeps, and published fragments."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from b12x_overlay.changes.receipts import Receipt, order_receipts, parse_receipt
from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git
from b12x_overlay.lines import Keep, Lines


@dataclass(frozen=True)
class Held:
    """Decides for a path whether beta's version of it stays."""

    keep: tuple[Keep, ...]
    published: dict[str, str]
    """Path to blob id on beta of each published fragment."""

    def pin(self, path: str) -> Keep | None:
        """The rule by which *path* is a version pin that beta keeps."""
        return next((rule for rule in self.keep if fnmatch.fnmatchcase(path, rule.path)), None)

    def __contains__(self, path: str) -> bool:
        return path in self.published or self.pin(path) is not None

    def among(self, paths: Iterable[str]) -> list[str]:
        return sorted({path for path in paths if path in self})


def read_tree(git: Git, commit: str, folder: str = "") -> dict[str, tuple[str, str]]:
    """Path to (mode, object id) of everything in *commit*, below *folder* if given."""
    told = git.fields(
        "ls-tree", "-r", "-z", "--full-tree", commit, "--", *([f"{folder}/"] if folder else [])
    )
    tree = {}
    for entry in told:
        meta, _, path = entry.partition("\t")
        mode, _, blob = meta.split(" ")
        tree[path] = (mode, blob)
    return tree


def check_rules(git: Git, canonical: str, beta: str, lines: Lines) -> list[str]:
    """What the rules name in vain; such a rule protects nothing, and is most often a slip of the pen.

    Raises:
        CommandError: the fragments' folder is a file.
    """
    paths = read_tree(git, canonical).keys() | read_tree(git, beta).keys()
    if lines.folder in paths:
        raise CommandError(
            f"--folder {lines.folder} is a file; wanted the folder that holds the fragments",
            code=ExitCode.USAGE, reason="folder", hint="name it, for example --folder .lil/changes",
        )  # fmt: skip
    found = [
        f"--keep {rule.path} ({rule.why}): no file of that name on either line, so nothing is kept by it"
        for rule in lines.keep
        if not any(fnmatch.fnmatchcase(path, rule.path) for path in paths)
    ]
    if not any(path.startswith(f"{lines.folder}/") for path in paths):
        found.append(
            f"--folder {lines.folder}: neither line has it, so there are no published fragments to protect"
        )
    return found


def last_receipt(git: Git, commit: str, lines: Lines) -> Receipt | None:
    """The newest receipt in *commit*'s tree.

    Raises:
        CommandError: a receipt cannot be read.
    """
    paths = sorted(
        path for path in read_tree(git, commit, lines.receipts) if path.endswith(".json")
    )
    blobs = git.blobs(f"{commit}:{path}" for path in paths)
    receipts = [
        parse_receipt(f"{commit[:12]}:{path}", data or b"")
        for path, data in zip(paths, blobs, strict=True)
    ]
    return next(reversed(order_receipts(receipts)), None)


def find_held(git: Git, beta: str, lines: Lines, receipt: Receipt | None) -> Held:
    """What is held on *beta*: without a receipt every fragment there counts as published."""
    fragments = {path: blob for path, (_, blob) in read_tree(git, beta, lines.folder).items()}
    if receipt is not None:
        named = {f"{lines.folder}/{name}.json" for name in receipt.fragments}
        fragments = {path: blob for path, blob in fragments.items() if path in named}
    return Held(lines.keep, fragments)
