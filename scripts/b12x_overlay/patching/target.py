# SPDX-License-Identifier: Apache-2.0
"""Folders that a patch set goes to: a source tree or checkout, or an installed package with its RECORD."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.patching import again, checkout, record
from b12x_overlay.patching.entry import Change, Entry, Found
from b12x_overlay.patching.tree import Tree

_VERSION = re.compile(rb"^__version__ = version = '([^']+)'", re.MULTILINE)
_HEADER = re.compile(rb"^Version: *(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class FolderTarget:
    """A folder that holds vllm/."""

    kind: str
    """``tree`` or ``installed``."""
    tree: Tree
    version: str | None
    record: str | None = None
    """RECORD relative to the folder; None for a source tree and for a package without one."""

    @property
    def root(self) -> Path:
        """The folder, links resolved."""
        return self.tree.root

    @property
    def label(self) -> str:
        """The target for messages."""
        return str(self.root)

    def read(self, path: str) -> Found:
        """What stands at *path*."""
        return self.tree.read(path)

    def record_entry(self) -> Entry | None:
        """RECORD, where there is one."""
        found = self.read(self.record) if self.record else None
        return found if isinstance(found, Entry) else None


def at_folder(path: Path) -> FolderTarget:
    """The source tree, checkout or site directory at *path*.

    Raises:
        CommandError: it does not hold vllm/.
    """
    if not path.exists():
        raise CommandError(
            f"{path} does not exist",
            reason="no-target",
            hint="give the top folder of a vLLM source tree or a .whl",
        )
    if not (path / "vllm" / "__init__.py").is_file():
        raise CommandError(
            f"{path} holds no vllm/__init__.py", reason="no-target", hint=_where(path)
        )
    tree = Tree(path)
    infos = sorted(tree.root.glob("vllm-*.dist-info"))
    if len(infos) > 1:
        raise CommandError(
            f"{path} has several vLLM installations: {', '.join(info.name for info in infos)}",
            reason="ambiguous-target",
            hint="uninstall vllm there until none is left, then install the pinned version",
        )
    if infos:
        return installed_at(tree, infos[0])
    return FolderTarget("tree", tree, _tree_version(tree))


def installed_at(tree: Tree, info: Path) -> FolderTarget:
    """The installed package whose metadata folder is *info*."""
    record = info / "RECORD"
    match = (
        _HEADER.search((info / "METADATA").read_bytes()) if (info / "METADATA").is_file() else None
    )
    return FolderTarget(
        "installed",
        tree,
        match[1].decode() if match else None,
        record.relative_to(tree.root).as_posix() if record.is_file() else None,
    )


def refuse_to_write(target: FolderTarget) -> None:
    """Stop where git is in the middle of something.

    Raises:
        CommandError: see ``checkout.refuse_unfinished``.
    """
    checkout.refuse_unfinished(target.root)


def with_record(
    target: FolderTarget,
    changes: list[Change],
    files: dict[str, Entry | None],
    added: Collection[str],
) -> list[Change]:
    """*changes* and the RECORD rows that *files* (every path's final content) want; *added* are not upstream's."""
    entry = target.record_entry()
    if entry is None or target.record is None:
        return changes
    data = record.update(entry.data, files, added)
    if data == entry.data:
        return changes
    return [*changes, Change(target.record, entry, Entry(data, entry.executable))]


def _tree_version(tree: Tree) -> str | None:
    """What a source tree says about its version; a checkout's generated file may be old, so it says nothing."""
    if checkout.git_dir(tree.root) is not None:
        return None
    for name, pattern in (("PKG-INFO", _HEADER), ("vllm/_version.py", _VERSION)):
        found = tree.read(name)
        match = pattern.search(found.data) if isinstance(found, Entry) else None
        if match:
            return match[1].decode()
    return None


def _where(path: Path) -> str:
    for candidate in (path.parent, *sorted(path.glob("*"))):
        if candidate.is_dir() and (candidate / "vllm" / "__init__.py").is_file():
            return again.command("apply", candidate)
    return "give the folder that contains vllm/, the word 'installed', or a .whl file"
