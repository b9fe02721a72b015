# SPDX-License-Identifier: Apache-2.0
"""scripts/changes: check fragments, write one, write release notes and receipts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from b12x_overlay.changes import commands, creating
from b12x_overlay.changes.model import NO_ACTION, SECTIONS
from b12x_overlay.changes.place import add_place_flags
from b12x_overlay.console import EXIT_CODE_HELP, Parser, add_common_flags, console_from, guarded


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="scripts/changes", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXIT_CODE_HELP,
        description="Release fragments: one JSON file in changes/ for each user-visible change.",
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    check = _verb(verbs, "check", "check every fragment; prints every fault with its fix")
    check.set_defaults(run=commands.check)

    published = _verb(
        verbs, "published", "list the published fragments and say whether they are unchanged"
    )
    published.set_defaults(run=commands.published)

    notes = _verb(verbs, "notes", "release notes of the fragments that are new since a release")
    notes.add_argument(
        "--since", metavar="RELEASE",
        help="a release with a receipt, a receipt file, a commit or tag, or 'none'; default: the last release",
    )  # fmt: skip
    notes.add_argument(
        "--level", type=int, choices=range(1, 6), default=2, help="level of the heading (default 2)"
    )
    notes.set_defaults(run=commands.notes)

    receipt = _verb(
        verbs, "receipt", "record what a release publishes; from then on those fragments are fixed"
    )
    receipt.add_argument(
        "--release", required=True, metavar="NAME", help="the release, for example its image tag"
    )
    receipt.add_argument(
        "--published-at",
        metavar="TIME",
        help="UTC time, for example 2026-11-30T12:00:00Z; default: now",
    )
    receipt.set_defaults(run=commands.receipt)

    new = _verb(verbs, "new", "write a fragment from flags; asks for what is missing at a terminal")
    new.add_argument("--id", help="vllm-short-name; the file's name without .json")
    new.add_argument("--category", choices=tuple(SECTIONS))
    new.add_argument("--summary", help="one sentence for the user")
    new.add_argument(
        "--model", dest="models", action="append", metavar="NAME", help='repeatable; default "all"'
    )
    new.add_argument("--compatibility", help=f'what the user must do; default "{NO_ACTION}"')
    new.add_argument("--detail", dest="details", action="append", metavar="TEXT", help="repeatable")
    new.add_argument(
        "--pull-request",
        dest="pull_requests",
        action="append",
        type=int,
        metavar="N",
        help="repeatable",
    )
    new.add_argument(
        "--author", dest="authors", action="append", metavar="HANDLE", help="repeatable, without @"
    )
    new.add_argument("--requires", action="append", metavar="ID", help="repeatable")
    new.add_argument("--evidence", action="append", metavar="URL", help="repeatable")
    new.add_argument("--dry-run", action="store_true", help="print the fragment, write nothing")
    new.set_defaults(run=creating.new)
    return parser


def _verb(verbs: argparse._SubParsersAction[Parser], name: str, text: str) -> Parser:
    verb = verbs.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=EXIT_CODE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_place_flags(verb)
    add_common_flags(verb)
    return verb


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = build_parser().parse_args(argv)
    console = console_from(args)
    return guarded(console, lambda: args.run(args, console))
