# SPDX-License-Identifier: Apache-2.0
"""scripts/sync-beta: bring canonical's work to beta."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from b12x_overlay.console import (
    CommandError,
    Console,
    Parser,
    add_common_flags,
    console_from,
    guarded,
)
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import require_version
from b12x_overlay.lines import LINES_FILE, Keep, Lines, check_lines, read_lines
from b12x_overlay.paths import REPO
from b12x_overlay.sync import outcome, report, run
from b12x_overlay.sync.outcome import Outcome
from b12x_overlay.sync.workspace import open_repository

_EPILOG = """what happens:
  The remote's tips are fetched, canonical's commits that beta lacks are picked with `cherry-pick -x` in a temporary
  work tree, the result is checked, and only then one ref changes: the local beta branch (--land) or the work branch
  at the remote (--push). After anything else neither line has changed.

exit codes:
  0    synced, and nothing to do; the last line and the JSON's "outcome" say which;
       with --detailed-exit-code nothing to do only
  1    --dry-run: a sync would bring something
  2    usage
  3    refused: a published fragment, an unexplained difference, a moved tip, a checked-out beta …
  4    unexpected failure (input/output, network, a bug)
  5    conflict: resolve it, then --continue, or --abort
  10   synced, with --detailed-exit-code only
  130  interrupted"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="scripts/sync-beta", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
        description="Bring beta the canonical changes that it lacks.",
    )  # fmt: skip
    parser.always = {"outcome": "failed"}
    parser.add_argument("--repo", type=Path, default=REPO, help="the repository; default: this one")
    parser.add_argument(
        "--canonical", metavar="REF", help="what is meant to last; default: as in the lines file"
    )
    parser.add_argument(
        "--beta", metavar="REF", help="the branch that receives it; default: as in the lines file"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--land", action="store_true", help="move the local beta branch, once, by its old value"
    )
    what.add_argument(
        "--push", action="store_true", help="push a work branch, with lease, for one pull request"
    )
    what.add_argument(
        "--continue", dest="go_on", action="store_true", help="go on after a resolved conflict"
    )
    what.add_argument("--abort", action="store_true", help="take an unfinished sync away")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would happen and change nothing at all"
    )
    remote = parser.add_mutually_exclusive_group()
    remote.add_argument(
        "--remote",
        metavar="NAME",
        help="default: as in the lines file, else origin, if there is one",
    )
    remote.add_argument("--no-remote", action="store_true", help="look at local branches only")
    parser.add_argument(
        "--lines",
        type=Path,
        metavar="FILE",
        help=f"the lines file; default: {LINES_FILE} of the repository",
    )
    parser.add_argument(
        "--folder",
        metavar="DIR",
        help="the fragments' folder in the repository, for example .lil/changes",
    )
    parser.add_argument("--component", help="what the fragments' ids start with")
    parser.add_argument("--work-branch", metavar="NAME", help="the branch of the pull request")
    parser.add_argument(
        "--author", metavar="HANDLE", help="credited where no author's GitHub handle is known"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATH",
        help="a file of which beta's version stays; repeatable",
    )
    parser.add_argument(
        "--detailed-exit-code",
        action="store_true",
        help="10 instead of 0 when something was brought",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write what happened as Markdown"
    )
    add_common_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not (args.land or args.push or args.go_on or args.abort or args.dry_run):
        parser.error("choose --land or --push, or --dry-run to see what they would do")
    if args.dry_run and (args.go_on or args.abort):
        parser.error("--dry-run goes with --land and --push only")
    if args.push and args.no_remote:
        parser.error("--push needs a remote")
    if args.report and not args.report.absolute().parent.is_dir():
        parser.error(f"--report {args.report}: its folder does not exist")
    if args.report and args.report.is_dir():
        parser.error(f"--report {args.report} is a folder; wanted a file")
    signal.signal(signal.SIGTERM, _terminate)
    console = console_from(args)
    found = Outcome()
    return guarded(console, lambda: _run(args, console, found))


def _run(args: argparse.Namespace, console: Console, found: Outcome) -> int:
    # Absolute, so that it works from wherever the ways out lead, the work tree of a conflict first of all.
    command = shlex.join([str(REPO / "scripts" / "sync-beta"), "--repo", str(args.repo.absolute())])
    try:
        if args.go_on:
            run.go_on(args.repo, command, console, found)
        elif args.abort:
            run.abort(args.repo, command, console, found)
        else:
            run.sync(_options(args, command), console, found)
    except CommandError as error:
        found.error = error
        if error.code == ExitCode.REFUSED:
            found.kind = outcome.REFUSED
    # What can fail comes last: a ref may have moved, and then somebody has to be told.
    outcome.print_outcome(console, found)
    console.json(found.as_json())
    if args.report:
        _write_report(args.report, found, console)
    return found.exit_code(args.detailed_exit_code)


def _write_report(path: Path, found: Outcome, console: Console) -> None:
    """Write the report; that it cannot be written does not change what the run has done, nor its exit code."""
    try:
        path.write_text(report.render(found), encoding="utf-8", errors="replace")
    except OSError as error:
        console.error(
            f"--report {path} cannot be written: {error.strerror}; the sync itself is as told above"
        )


def _options(args: argparse.Namespace, command: str) -> run.Options:
    require_version()
    file = args.lines or open_repository(args.repo).folder / LINES_FILE
    there = bool(args.lines) or file.is_file()
    lines = read_lines(file) if there else Lines()
    given = {
        key: value
        for key in ("canonical", "beta", "folder", "component", "work_branch", "author")
        if (value := getattr(args, key)) is not None
    }
    if "folder" in given:
        given["folder"] = given["folder"].removesuffix("/")
    keep = tuple(Keep(path, "named by --keep") for path in args.keep)
    lines = replace(lines, **given, keep=(*lines.keep, *keep))
    check_lines(lines, "the command line")
    for name in ("canonical", "beta"):
        if not getattr(lines, name):
            raise CommandError(
                f"--{name} must be given: {file} {'does not name the line' if there else 'does not exist'}",
                code=ExitCode.USAGE, reason=name, hint=f"{command} --canonical REF --beta REF --dry-run",
            )  # fmt: skip
    remote = "" if args.no_remote else args.remote
    return run.Options(
        args.repo,
        lines.canonical,
        lines.beta,
        remote,
        "push" if args.push else "land",
        args.dry_run,
        lines,
        command,
    )


def _terminate(signum: int, frame: FrameType | None) -> None:
    """End like Ctrl-C, so that the work tree is taken away."""
    sys.exit(128 + signum)
