# SPDX-License-Identifier: Apache-2.0
"""The sync's own fragment: one for each run that brought something, with canonical's authors."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from b12x_overlay.changes.model import plain
from b12x_overlay.changes.writing import fragment_bytes
from b12x_overlay.console import CommandError
from b12x_overlay.git import Git
from b12x_overlay.lines import Lines
from b12x_overlay.sync.history import Commit

_NOREPLY = re.compile(
    r"^(?:\d+\+)?([A-Za-z0-9](?:-?[A-Za-z0-9])*(?:_[A-Za-z0-9]+)?(?:\[bot\])?)@users\.noreply\.github\.com$"
)
_CO_AUTHOR = re.compile(r"^co-authored-by:\s*(.*?)\s*<([^<>]*)>\s*$", re.IGNORECASE | re.MULTILINE)
_SHOWN = 30
_SUFFIXES: tuple[str, ...] = ("", *"bcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True)
class Record:
    """The fragment to add."""

    id: str
    path: str
    data: bytes
    subject: str


def is_record(path: str, lines: Lines) -> bool:
    """Whether *path* is a sync's own fragment."""
    return (
        re.fullmatch(
            rf"{re.escape(lines.folder)}/{re.escape(lines.component)}-canonical-sync-\d{{8}}[b-z]?\.json",
            path,
        )
        is not None
    )


def make_record(
    commits: Sequence[Commit], lines: Lines, taken: Iterable[str], pins: Sequence[str], today: str
) -> Record:
    """The fragment for bringing *commits*.

    Args:
        taken: ids that exist on either line.
        pins: paths of which beta kept its version.
        today: the UTC date as YYYYMMDD.

    Raises:
        CommandError: 26 syncs on one day, or no author with a known handle and none configured.
    """
    name = _free_name(f"{lines.component}-canonical-sync-{today}", set(taken))
    authors, unknown = _credits(commits, lines)
    if not authors and not lines.author:
        raise CommandError(
            "no author of the brought commits has a known GitHub handle: " + ", ".join(unknown), reason="authors",
            hint="name one with --author, or add their mail addresses to [sync.handles] of the lines file",
        )  # fmt: skip
    count = f"{len(commits)} canonical change" + ("s" if len(commits) > 1 else "")
    values = {
        "id": name,
        "category": lines.category,
        "summary": f"Beta has the work of canonical as of {today[:4]}-{today[4:6]}-{today[6:]} ({count}).",
        "models": ["all"],
        "compatibility": "No user action required.",
        "details": _details(commits, lines, pins, unknown),
        "authors": authors or [lines.author],
    }
    path = f"{lines.folder}/{name}.json"
    return Record(
        name, path, fragment_bytes(values), f"Record the canonical sync {name.rpartition('-')[2]}"
    )


def utc_today() -> str:
    """The date for the fragment's name: today, or that of SOURCE_DATE_EPOCH."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = float(epoch) if epoch.isascii() and epoch.isdigit() else time.time()
    return datetime.datetime.fromtimestamp(now, datetime.UTC).strftime("%Y%m%d")


def ids_at(git: Git, commit: str, folder: str) -> set[str]:
    """Fragment ids in *commit*'s tree."""
    names = git.fields("ls-tree", "-z", "--name-only", "--full-tree", commit, "--", f"{folder}/")
    return {name.rpartition("/")[2].removesuffix(".json") for name in names}


def _free_name(base: str, taken: set[str]) -> str:
    for suffix in _SUFFIXES:
        if base + suffix not in taken:
            return base + suffix
    raise CommandError(
        f"{base} to {base}z exist already", reason="names", hint="sync again tomorrow (UTC)"
    )


def _credits(commits: Iterable[Commit], lines: Lines) -> tuple[list[str], list[str]]:
    """Handles of authors and co-authors, and the names of those whose handle is not known."""
    handles: dict[str, str] = {}
    unknown: dict[str, None] = {}
    for commit in commits:
        for name, mail in [(commit.author, commit.mail), *_CO_AUTHOR.findall(commit.message)]:
            found = _NOREPLY.match(mail)
            login = str(found[1]) if found else ""
            handle = lines.handles.get(mail.lower(), login)
            if handle:
                handles.setdefault(handle.lower(), handle)
            elif _one_line(name):
                unknown.setdefault(_one_line(name))
    return sorted(handles.values(), key=str.lower), sorted(unknown)


def _details(
    commits: Sequence[Commit], lines: Lines, pins: Sequence[str], unknown: Sequence[str]
) -> list[str]:
    bare = [
        one
        for one in commits
        if not any(change.path.startswith(f"{lines.folder}/") for change in one.changes)
    ]
    subjects = list(dict.fromkeys(_one_line(one.subject) for one in bare if _one_line(one.subject)))
    details = [f"Without a fragment of its own: {subject}" for subject in subjects[:_SHOWN]]
    if len(subjects) > _SHOWN:
        details.append(
            f"And {len(subjects) - _SHOWN} further changes without a fragment of their own."
        )
    if pins:
        details.append(f"Beta keeps its own version of {', '.join(pins)}.")
    if unknown:
        details.append(f"Also by {', '.join(unknown)}.")
    return details


def _one_line(text: str) -> str:
    shown = plain(" ".join(text.split()))
    return shown.encode("utf-8", "replace").decode("utf-8")
