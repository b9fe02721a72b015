# SPDX-License-Identifier: Apache-2.0
"""``scripts/changes new``: a fragment from flags, or from questions at a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from b12x_overlay.changes.checking import check_entries
from b12x_overlay.changes.model import NO_ACTION, SECTIONS, Entry, Fault, plain
from b12x_overlay.changes.place import find_place
from b12x_overlay.changes.reading import read_folder
from b12x_overlay.changes.writing import fragment_bytes, write_new
from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode

_LISTS = ("models", "details", "pull_requests", "authors", "requires", "evidence")


def new(args: argparse.Namespace, console: Console) -> int:
    """Write a fragment; nothing is written unless it is valid beside the others."""
    place = find_place(args)
    entries = read_folder(place.folder)
    values: dict[str, Any] = {
        key: getattr(args, key) for key in ("id", "category", "summary", "compatibility", *_LISTS)
    }
    if sys.stdin.isatty() and _missing(values):
        _ask(values, place.component)
    missing = _missing(values)
    if missing:
        raise CommandError(
            f"missing: {', '.join(missing)}", code=ExitCode.USAGE, reason="missing",
            hint="give the flags, or run scripts/changes new at a terminal and answer its questions",
        )  # fmt: skip
    values["models"] = values["models"] or ["all"]
    values["compatibility"] = values["compatibility"] or NO_ACTION
    file = f"{values['id']}.json"
    if any(entry.name == file for entry in entries):
        raise CommandError(
            f"{place.folder / file} exists; nothing was written", reason="fragment-exists",
            hint="choose another --id: a published fragment is corrected by a new one",
        )  # fmt: skip
    data = fragment_bytes(values)
    report = check_entries([*entries, Entry(file, data)], place.component)
    faults = [fault for fault in report.faults if fault.file == file]
    if faults:
        _refuse(faults)
    if args.dry_run:
        console.say(data.decode("utf-8").rstrip("\n"))
    else:
        write_new(place.folder / file, data)
        console.say(f"wrote {place.folder / file}")
        console.say("next: scripts/changes check, then commit it with the change")
    console.json(
        {
            "ok": True,
            "file": str(place.folder / file),
            "written": not args.dry_run,
            "fragment": data.decode(),
        }
    )
    return ExitCode.OK


def _missing(values: dict[str, Any]) -> list[str]:
    missing = [f"--{key}" for key in ("id", "category", "summary") if not values[key]]
    if not values["pull_requests"] and not values["authors"]:
        missing.append("one of --author and --pull-request")
    return missing


def _refuse(faults: list[Fault]) -> None:
    told = [
        f"{fault.path or 'file name'} {plain(fault.what)}; {plain(fault.fix)}" for fault in faults
    ]
    raise CommandError(
        "\n  ".join([f"{faults[0].file} would not be valid; nothing was written:", *told]),
        code=ExitCode.DIFFERENT, reason="faults", hint="correct the flags and run it again",
    )  # fmt: skip


def _ask(values: dict[str, Any], component: str) -> None:
    ask = _asker()
    if not values["id"]:
        values["id"] = ask(f"id ({component}-short-name): ")
    while not values["category"]:
        answer = ask(f"category ({', '.join(SECTIONS)}): ")
        values["category"] = answer if answer in SECTIONS else None
    if not values["summary"]:
        values["summary"] = ask("summary, one sentence for the user: ")
    if values["models"] is None:
        values["models"] = _split(ask("models, separated by commas (empty: all): "))
    if values["compatibility"] is None:
        values["compatibility"] = ask(f"what must the user do? (empty: {NO_ACTION}): ")
    if not values["pull_requests"]:
        numbers = _split(ask("pull requests, separated by commas (empty: none): "))
        values["pull_requests"] = [int(one.lstrip("#")) if one.lstrip("#").isascii() and one.lstrip("#").isdigit()
                                   else one for one in numbers]  # fmt: skip
    if not values["authors"]:
        values["authors"] = _split(ask("authors' GitHub handles, separated by commas: "))


def _asker() -> Callable[[str], str]:
    def ask(question: str) -> str:
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:
            raise CommandError(
                "the answers ended; nothing was written", code=ExitCode.USAGE, reason="missing"
            )
        return answer.strip()

    return ask


def _split(answer: str) -> list[str]:
    return [part.strip() for part in answer.split(",") if part.strip()]
