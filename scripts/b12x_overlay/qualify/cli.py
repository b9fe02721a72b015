# SPDX-License-Identifier: Apache-2.0
"""scripts/qualify: argv in, exit code out."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Sequence

from b12x_overlay.console import console_from, guarded
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.qualify import options as opts


def main(argv: Sequence[str]) -> int:
    """Run one command; every expected failure is one message and its exit code."""
    options = opts.parser().parse_args(argv)
    console = console_from(options)
    try:
        return guarded(console, lambda: _run(options, argv))
    except Exception as error:  # a bug must not look like a verdict (a traceback's exit code is 1)
        traceback.print_exc()
        console.error(f"unexpected: {error!r}", "what was measured is kept; please report this")
        return ExitCode.FAILED


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.command == "schema":
        from b12x_overlay.qualify.schema import Result

        print(json.dumps(Result.model_json_schema(), indent=1))
        return ExitCode.OK
    if options.command == "needle-task":
        return _needle_task(options)
    from b12x_overlay.qualify import commands  # the libraries behind it take a second to import

    return commands.COMMANDS[options.command](options, argv)


def _needle_task(options: argparse.Namespace) -> int:
    from b12x_overlay.qualify.needle import make_task
    from b12x_overlay.qualify.plan_options import needle_from

    task = make_task(needle_from(options))
    request = {
        "messages": task.messages(),
        "tools": [task.tool()],
        "expected": {**task.facts, "checksum": task.checksum},
    }
    print(json.dumps(request, indent=1))
    return ExitCode.OK
