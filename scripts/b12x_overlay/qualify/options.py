# SPDX-License-Identifier: Apache-2.0
"""The command line of scripts/qualify, and the plan it describes."""

from __future__ import annotations

import argparse
from pathlib import Path

from b12x_overlay.console import Parser, add_common_flags
from b12x_overlay.qualify.promises import QUESTIONS
from b12x_overlay.qualify.settings import (
    DEFAULT_THRESHOLDS,
    DecodePlan,
    NeedlePlan,
    PrefillPlan,
)

MOST_ROUNDS = 1000
PARTS = ("prefill", "decode", "needle")

_EPILOG = """\
exit codes:
  0    measured, and no limit missed (an inconclusive line too, unless --strict)
  1    a limit missed, or the run is incomplete
  2    wrong usage
  3    refused: the folder holds another plan, the server changed, nothing can be compared
  4    no server, or an unexpected failure
  130  interrupted; the same command with --out FOLDER goes on

examples:
  scripts/qualify run http://127.0.0.1:8000
  scripts/qualify run http://127.0.0.1:8000 --only prefill --prefill-lengths 2K,8K --prefill-repeats 3
  scripts/qualify ab http://127.0.0.1:8000 http://127.0.0.1:8001
  scripts/qualify ab http://127.0.0.1:8000 --restart ./serve.sh --question a4
  scripts/qualify compare build/qualify/before/result.json build/qualify/after/result.json
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(
        prog="scripts/qualify", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
        description="Does this server do what the image promises? Measures prefill and decode speed, the needle "
        "checksum and degenerate output of an OpenAI-compatible server, compares two, and writes result.json, "
        "report.md and report.html. Only the given address is contacted.",
    )  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="measure one server", formatter_class=_Formatter)
    run.add_argument("address", help="http://HOST:PORT of the server")
    run.add_argument("--rounds", type=_rounds, default=1, help="blocks of the whole plan")
    _server_options(run, "")
    _plan_options(run)
    _run_options(run)

    ab = commands.add_parser(
        "ab",
        help="compare two servers, or one restarted with other variables",
        formatter_class=_Formatter,
    )
    ab.add_argument("address", help="http://HOST:PORT of A, or of the one server with --restart")
    ab.add_argument("address_b", nargs="?", help="http://HOST:PORT of B")
    ab.add_argument("--rounds", type=_rounds, default=1, help="times A B B A")
    ab.add_argument(
        "--question",
        choices=sorted(QUESTIONS),
        help="what the two differ in; sets limits, and the variable with --restart",
    )
    ab.add_argument(
        "--restart",
        metavar="COMMAND",
        help="run before every block with that side's variables: it replaces the server and ends, or is the server",
    )
    ab.add_argument(
        "--restart-timeout",
        type=_seconds,
        default=1800.0,
        metavar="S",
        help="seconds until the restarted server must answer",
    )
    for side in ("a", "b"):
        ab.add_argument(
            f"--env-{side}",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"variable of {side.upper()} for --restart; one given for the other side only is unset",
        )
        ab.add_argument(
            f"--label-{side}",
            default=side.upper(),
            metavar="TEXT",
            help=f"name of {side.upper()} in the report",
        )
    _server_options(ab, "-a", "-b")
    _plan_options(ab)
    _run_options(ab)

    compare = commands.add_parser(
        "compare", help="compare two results of 'run'", formatter_class=_Formatter
    )
    compare.add_argument("a", type=Path, help="result.json (or its folder) of A")
    compare.add_argument("b", type=Path, help="result.json (or its folder) of B")
    compare.add_argument(
        "--question", choices=sorted(QUESTIONS), help="what the two differ in; sets limits"
    )
    _run_options(compare, measuring=False)

    report = commands.add_parser(
        "report",
        help="write report.md and report.html again, with other limits if given (of another file NAME.json: NAME.md, NAME.html)",
        formatter_class=_Formatter,
    )
    report.add_argument("result", type=Path, help="result.json or its folder")
    _run_options(report, measuring=False, out=False)

    schema = commands.add_parser("schema", help="print the JSON Schema of result.json")
    add_common_flags(schema)
    task = commands.add_parser(
        "needle-task", help="print the generated needle request", formatter_class=_Formatter
    )
    _needle_options(task)
    add_common_flags(task)
    return top


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults in the help, but not for what has none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS) or action.required:
            return action.help
        return super()._get_help_string(action)


def _server_options(to: argparse.ArgumentParser, *sides: str) -> None:
    group = to.add_argument_group("server")
    for side in sides:
        of = f" of {side[1:].upper()}" if side else ""
        group.add_argument(
            f"--model{side}", metavar="NAME", help=f"model{of}, where the server has several"
        )
        group.add_argument(
            f"--identity{side}",
            action="append",
            default=[],
            type=Path,
            metavar="FILE",
            help=f"manifest.json of the image or 'doctor --json' output{of}; may be given twice",
        )
        group.add_argument(
            f"--server-log{side}",
            type=Path,
            metavar="FILE",
            help=f"local log file{of}: tells whether A4 was really used",
        )
    group.add_argument(
        "--api-key-env", metavar="VARIABLE", help="environment variable that holds the key"
    )
    group.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="certificate authority for https"
    )


def _plan_options(to: argparse.ArgumentParser) -> None:
    prefill, decode = PrefillPlan.model_construct(), DecodePlan.model_construct()
    what = to.add_argument_group("what to measure")
    what.add_argument("--only", metavar="PARTS", help=f"of {', '.join(PARTS)}")
    what.add_argument("--skip", metavar="PARTS", help=f"of {', '.join(PARTS)}")
    what.add_argument(
        "--prefill-lengths", default="2K,8K,32K", metavar="LIST", help="prompt tokens"
    )
    what.add_argument("--prefill-repeats", type=int, default=prefill.repeats, metavar="N")
    what.add_argument("--prefill-warmups", type=int, default=prefill.warmups, metavar="N")
    what.add_argument(
        "--decode-concurrency", default="1,8,16", metavar="LIST", help="streams kept busy"
    )
    what.add_argument("--decode-windows", type=int, default=decode.windows, metavar="N")
    what.add_argument(
        "--decode-window",
        type=float,
        default=decode.window_seconds,
        metavar="S",
        help="seconds per window",
    )
    what.add_argument(
        "--decode-settle",
        type=float,
        default=decode.settle_seconds,
        metavar="S",
        help="uncounted seconds first",
    )
    what.add_argument(
        "--decode-ramp",
        type=float,
        default=decode.ramp_seconds,
        metavar="S",
        help="limit for every stream's first token",
    )
    what.add_argument(
        "--decode-max-tokens",
        type=int,
        default=decode.max_tokens,
        metavar="N",
        help="of one answer",
    )
    what.add_argument("--decode-temperature", type=float, default=decode.temperature, metavar="T")
    what.add_argument(
        "--decode-ignore-eos",
        action="store_true",
        help="write on past an answer's end (its text is not judged then)",
    )
    what.add_argument(
        "--cooldown", type=float, default=0.0, metavar="S", help="pause between blocks"
    )
    _needle_options(to)


def _needle_options(to: argparse.ArgumentParser) -> None:
    plan = NeedlePlan.model_construct()
    group = to.add_argument_group("needle checksum (all recorded; only equal values compare)")
    for name, default, text in (
        ("runs", plan.runs, "runs per block"),
        ("requests", plan.requests, "requests per run"),
        ("concurrency", plan.concurrency, "requests in flight"),
        ("records", plan.records, "records around the facts"),
        ("facts", plan.facts, "hidden facts"),
        ("variants", plan.variants, "different tasks in turn"),
        ("near", plan.near, "largest error of a NEAR_MISS"),
        ("max-tokens", plan.max_tokens, "of one answer"),
        ("sampling-seed", plan.sampling_seed, "seed of every request"),
    ):
        group.add_argument(f"--needle-{name}", type=int, default=default, metavar="N", help=text)
    group.add_argument(
        "--needle-salt",
        choices=("request", "run"),
        default=plan.salt,
        help="prefill every request, or every run once: quicker, but its lines are never conclusive",
    )
    group.add_argument("--needle-temperature", type=float, default=plan.temperature, metavar="T")
    group.add_argument("--needle-top-p", type=float, default=plan.top_p, metavar="P")
    group.add_argument(
        "--needle-task-seed",
        default=plan.task_seed,
        metavar="TEXT",
        help="another seed, another task",
    )
    group.add_argument(
        "--needle-positions",
        metavar="LIST",
        help="place of each fact, 0 to 1 (default: spread evenly)",
    )
    group.add_argument(
        "--needle-template",
        metavar="JSON",
        help="chat_template_kwargs, for example '{\"enable_thinking\": true}'",
    )


def _run_options(to: argparse.ArgumentParser, *, measuring: bool = True, out: bool = True) -> None:
    group = to.add_argument_group("output and limits")
    if out:
        group.add_argument(
            "--out",
            type=Path,
            metavar="FOLDER",
            help="result folder; one with a partial result is resumed (default: build/qualify/TIME)",
        )
    group.add_argument(
        "--thresholds",
        type=Path,
        default=DEFAULT_THRESHOLDS if measuring else None,
        metavar="FILE",
        help="limits (TOML)",
    )
    group.add_argument("--strict", action="store_true", help="exit 1 for an inconclusive line too")
    add_common_flags(to)
    if measuring:
        group.add_argument(
            "--max-requests",
            type=_positive,
            default=50_000,
            metavar="N",
            help="generation requests at most",
        )
        group.add_argument(
            "--max-minutes", type=_seconds, default=720.0, metavar="M", help="minutes at most"
        )
        group.add_argument(
            "--request-timeout",
            type=_seconds,
            default=900.0,
            metavar="S",
            help="seconds for one answer",
        )
        group.add_argument(
            "--stall-timeout",
            type=_seconds,
            default=120.0,
            metavar="S",
            help="seconds without data in a stream",
        )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return int(text)


def _rounds(text: str) -> int:
    if (rounds := _positive(text)) > MOST_ROUNDS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {MOST_ROUNDS}")
    return rounds


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")
    return value
