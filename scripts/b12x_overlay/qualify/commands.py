# SPDX-License-Identifier: Apache-2.0
"""What the commands do: run, ab, compare, report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from b12x_overlay.console import console_from
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.paths import build_dir
from b12x_overlay.qualify import sides as given
from b12x_overlay.qualify import store as stores
from b12x_overlay.qualify.budget import Budget
from b12x_overlay.qualify.client import Client, Timeouts
from b12x_overlay.qualify.compare import join
from b12x_overlay.qualify.errors import RefusedError
from b12x_overlay.qualify.lines import judge
from b12x_overlay.qualify.measure import measure
from b12x_overlay.qualify.plan_options import plan_from
from b12x_overlay.qualify.progress import Progress
from b12x_overlay.qualify.redact import Secrets
from b12x_overlay.qualify.report import report_names, write_reports
from b12x_overlay.qualify.schema import Arm, Result
from b12x_overlay.qualify.settings import load_thresholds
from b12x_overlay.qualify.sides import Side
from b12x_overlay.qualify.start import new_result, resume
from b12x_overlay.qualify.store import Store
from b12x_overlay.qualify.summary import print_summary
from b12x_overlay.qualify.variables import clean


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure one server."""
    return _measure(options, argv, given.single(options), "A" * options.rounds)


def ab(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compare two servers, or one that is restarted."""
    return _measure(options, argv, given.pair(options), "ABBA" * options.rounds)


def compare(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compare two finished runs."""
    a, b = (stores.load(_result_file(path)) for path in (options.a, options.b))
    result = join(a, b)
    result.question = options.question
    if options.thresholds:
        result.thresholds = load_thresholds(options.thresholds)
    folder = options.out or build_dir() / "qualify" / f"{_stamp()}-compare"
    with Store(folder, Secrets([])) as store:
        if store.path.exists():
            raise RefusedError(f"{folder} holds a result already; choose another --out")
        judge(result)
        return _finish(options, result, store)


def report(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Judge a result again and write its reports."""
    path = _result_file(options.result)
    result = stores.load(path)
    if options.thresholds:
        result.thresholds = load_thresholds(options.thresholds)
    judge(result)
    with Store(path.parent, Secrets([]), path.name) as store:
        return _finish(options, result, store)


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Sequence[str]], int]] = {
    "run": run, "ab": ab, "compare": compare, "report": report,
}  # fmt: skip


def _measure(
    options: argparse.Namespace, argv: Sequence[str], sides: list[Side], order: str
) -> int:
    """Everything given is checked before the result folder is made or the server contacted."""
    plan = plan_from(options, order)
    thresholds = load_thresholds(options.thresholds)
    key, authority = given.api_key(options), given.authority(options)
    question = getattr(options, "question", None)
    arms = [
        Arm(name=side.name, label=side.label, restart_environment=clean(side.environment))
        for side in sides
    ]
    folder = options.out or build_dir() / "qualify" / _stamp()
    console = console_from(options)

    def connect(side: Side, budget: Budget, timeouts: Timeouts) -> Client:
        return Client(
            side.address, budget, key=key, timeouts=timeouts, ca_file=authority,
            connections=plan.most_connections(),
        )  # fmt: skip

    with Store(folder, given.secrets_of(sides, key)) as store:
        result = store.existing()
        if result is None:
            result = new_result(plan, thresholds, arms, question)
        else:
            resume(result, plan, thresholds, arms, question, folder)
            done = result.status == "complete"
            console.progress(
                f"{folder} is complete; nothing is measured" if done else f"resuming {folder}"
            )
            if done:
                judge(result)
                return _finish(options, result, store)
        stopped = measure(
            options, sides, connect, result, store, Progress(console, quiet=options.quiet)
        )
        judge(result)
        code = _finish(options, result, store)
        if stopped is None:
            return code
        again = shlex.join(["scripts/qualify", *_without_out(argv), "--out", str(folder)])
        console.error(f"stopped: {stopped.why}", stopped.hint or f"continue with: {again}")
        return stopped.code


def _finish(options: argparse.Namespace, result: Result, store: Store) -> int:
    """Save, write the reports, print the summary; the verdict as an exit code."""
    write_reports(store.put(result), store)
    files = [*(store.folder / name for name in report_names(store)), store.path]
    print_summary(console_from(options), result, files)
    if options.json:
        print(store.path.read_text(encoding="utf-8"), end="")
    failed = {"fail", "incomplete"} | ({"inconclusive"} if options.strict else set())
    return ExitCode.DIFFERENT if result.verdict in failed else ExitCode.OK


def _result_file(path: Path) -> Path:
    return path / stores.RESULT if path.is_dir() else path


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def _without_out(argv: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for item in argv:
        if skip:
            skip = False
        elif item == "--out":
            skip = True
        elif not item.startswith("--out="):
            kept.append(item)
    return kept
