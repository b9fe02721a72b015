# SPDX-License-Identifier: Apache-2.0
"""The verbs of scripts/changes that read: check, published, notes; and receipt, which records a release."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from pathlib import Path

from b12x_overlay.changes.model import Fault, plain
from b12x_overlay.changes.notes import as_json, select
from b12x_overlay.changes.place import Place, find_place
from b12x_overlay.changes.receipts import (
    Receipt,
    parse_time,
    published_faults,
    read_receipt,
    read_receipts,
    write_receipt,
)
from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git


def check(args: argparse.Namespace, console: Console) -> int:
    """Report every fault; exit code 1 if there is one."""
    place = find_place(args)
    report = place.check()
    console.json(
        {
            "ok": not report.faults,
            "folder": str(place.folder),
            "component": place.component,
            "count": len(report.fragments),
            "faults": [fault.as_json() for fault in report.faults],
            "settled": [fault.as_json() for fault in report.settled],
            "external": report.external,
            "receipt": place.receipt.source if place.receipt else None,
            "patchset": str(place.patchset) if place.patchset else None,
        }
    )
    _print_faults(console, place.folder, report.faults)
    for fault in report.settled:
        console.say(
            f"{console.paint('published as it is:', 'yellow')} {_where(place.folder, fault)} {plain(fault.what)}"
        )
    for wanted, users in report.external.items():
        console.say(
            f"external: {plain(wanted)} (required by {', '.join(users)}) is another component's"
        )
    console.say(
        f"{_count(len(report.fragments), 'fragment')}, {_count(len(report.faults), 'fault')}; "
        + ("patch set: " + str(place.patchset) if place.patchset else "no patch set")
        + "; "
        + (f"published: {place.receipt.release}" if place.receipt else "no release published yet")
    )
    return ExitCode.DIFFERENT if report.faults else ExitCode.OK


def published(args: argparse.Namespace, console: Console) -> int:
    """List what the last release published, and every published fragment that is no longer the same bytes."""
    place = find_place(args)
    if place.receipt is None:
        console.json({"ok": True, "release": None, "fragments": {}, "faults": []})
        console.say(
            f"no receipt in {place.receipts}: nothing is published, every fragment may still be edited"
        )
        return ExitCode.OK
    faults = sorted(
        published_faults(place.entries(), place.receipt, place.component, place.old_bytes())
    )
    console.json(
        {
            "ok": not faults,
            "release": place.receipt.release,
            "published_at": place.receipt.published_at or None,
            "fragments": dict(place.receipt.fragments),
            "faults": [fault.as_json() for fault in faults],
        }
    )
    changed = {fault.file for fault in faults}
    for name, blob in sorted(place.receipt.fragments.items()):
        if f"{name}.json" not in changed:
            console.say(f"{blob[:12]}  {plain(name)}")
    _print_faults(console, place.folder, faults)
    console.say(
        f"{_count(len(place.receipt.fragments), 'fragment')} published in {place.receipt.release}, {len(faults)} changed"
    )
    return ExitCode.DIFFERENT if faults else ExitCode.OK


def notes(args: argparse.Namespace, console: Console) -> int:
    """Print the release notes; refuses while a fragment has a fault, so that none can be dropped."""
    from b12x_overlay.changes.markdown import (
        count_changes,
        render,
    )  # only notes need the Markdown libraries

    place = find_place(args)
    report = place.check()
    _refuse_faults(place, report.faults, "no notes are written")
    since, earlier = _since(args.since, place)
    found = select(report.fragments, earlier, since)
    markdown = render(found, place.component, place.lines.repository, args.level)
    expected = sum(fragment.id not in earlier for fragment in report.fragments)
    rendered = count_changes(markdown)
    if rendered != expected:
        raise CommandError(
            f"the notes show {rendered} changes, {expected} fragments are new; nothing was written",
            code=ExitCode.FAILED, reason="count", hint="report this with the folder: it is a fault of this command",
        )  # fmt: skip
    if args.json:
        console.json({**as_json(found), "markdown": markdown})
    else:
        console.say(markdown.rstrip("\n"))
    return ExitCode.OK


def receipt(args: argparse.Namespace, console: Console) -> int:
    """Write the receipt of a release; refuses while a fragment has a fault."""
    place = find_place(args)
    report = place.check()
    _refuse_faults(place, report.faults, "no receipt is written")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    published_at = args.published_at or now
    if parse_time(published_at) is None:
        raise CommandError(
            f"--published-at is {published_at!r}; wanted a UTC time such as {now}",
            code=ExitCode.USAGE,
            reason="time",
        )
    last = next(reversed(read_receipts(place.receipts)), None)
    if last is not None and published_at <= last.published_at:
        raise CommandError(
            f"--published-at {published_at} is not after {last.release}, published at {last.published_at}",
            reason="order", hint="give the time at which this release was published",
        )  # fmt: skip
    head = Git(place.folder).run("rev-parse", "--verify", "--quiet", "HEAD", ok=range(256))
    fragments = {fragment.id: fragment.blob for fragment in report.fragments}
    made = Receipt(args.release, published_at, fragments, "", head.text if head.code == 0 else "")
    path = write_receipt(place.receipts, made)
    console.json({"ok": True, "receipt": str(path), "count": len(fragments)})
    console.say(f"wrote {path}: {_count(len(fragments), 'fragment')} published in {args.release}")
    console.say("next: commit it; from now on these fragments are corrected by new ones")
    return ExitCode.OK


def _since(wanted: str | None, place: Place) -> tuple[str, Mapping[str, str]]:
    """The earlier release's name and its fragments, id to blob id."""
    if wanted == "none":
        return "", {}
    receipts = read_receipts(place.receipts)
    if wanted is None:
        last = place.receipt or next(reversed(receipts), None)
        return (last.release, last.fragments) if last else ("", {})
    for one in receipts:
        if one.release == wanted:
            return one.release, one.fragments
    if Path(wanted).is_file():
        given = read_receipt(Path(wanted))
        return given.release, given.fragments
    git = Git(place.folder)
    commit = git.commit(wanted)
    if commit is None:
        known = ", ".join(one.release for one in receipts) or "none"
        raise CommandError(
            f"--since {wanted}: no release, receipt file, commit or tag of that name; releases with a receipt: {known}",
            code=ExitCode.USAGE, reason="since", hint="see git tag, or give --since none for all changes",
        )  # fmt: skip
    entries = git.fields("ls-tree", "-z", commit, "./")
    found = {}
    for entry in entries:
        meta, _, path = entry.partition("\t")
        name = Path(path).name
        if name.endswith(".json"):
            found[name.removesuffix(".json")] = meta.split()[2]
    return wanted, found


def _refuse_faults(place: Place, faults: list[Fault], what: str) -> None:
    if not faults:
        return
    told = [
        f"{_where(place.folder, fault)} {plain(fault.what)}; {plain(fault.fix)}" for fault in faults
    ]
    raise CommandError(
        "\n  ".join([f"{_count(len(faults), 'fault')} in {place.folder}; {what}:", *told]),
        code=ExitCode.DIFFERENT, reason="faults", hint="correct them and run scripts/changes check",
    )  # fmt: skip


def _print_faults(console: Console, folder: Path, faults: list[Fault]) -> None:
    for fault in faults:
        console.say(
            f"{console.paint(_where(folder, fault), 'red')} {plain(fault.what)}\n    fix: {plain(fault.fix)}"
        )


def _where(folder: Path, fault: Fault) -> str:
    file = fault.file if "/" in fault.file else str(folder / fault.file)
    return f"{plain(file)}: {fault.path}:" if fault.path else f"{plain(file)}:"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
