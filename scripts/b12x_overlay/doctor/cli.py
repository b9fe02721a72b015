# SPDX-License-Identifier: Apache-2.0
"""The command line of ``doctor``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from b12x_overlay.console import Console, Parser, add_common_flags, console_from, guarded
from b12x_overlay.doctor.examine import Question, Report, examine
from b12x_overlay.doctor.report import show
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image.expected import load_or_refuse

_DESCRIPTION = """\
Say what will work here: the b12x that `import b12x` gives and whether two of them clash, GPU and driver, the
installed vllm, and which features will be active with these environment variables, flags and this checkpoint.
Imports neither vllm nor torch. Run it with the Python and the environment variables of the server.
"""

_EPILOG = """\
examples:
  doctor                                             what is installed here
  doctor -- vllm serve MODEL --moe-backend b12x -tp 2   will this command do what I want?
  doctor -- VLLM_B12X_CSF_COMPRESS=1 vllm serve ...  with variables that this shell does not have
  doctor --checkpoint DIR                            which of its layers are calibrated?
  docker run --rm --gpus all --entrypoint python3 IMAGE /opt/b12x-overlay/doctor

exit codes:
  0    everything asked for will work (asked for: by a variable, a flag or the checkpoint)
  1    something is broken, or something that was asked for will not be active or cannot be decided here
  2    usage
  4    unexpected failure
  130  interrupted
"""


_OLDEST = 5
"""Maxwell, the oldest that CUDA 12 knows: "12" is not SM12 but an SM120 cut short."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``doctor`` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = words, []
    if "--" in words:
        own, command = words[: words.index("--")], words[words.index("--") + 1 :]
    args = _parser().parse_args(own)
    console = console_from(args)
    environ, command = _with_variables(command)
    question = Question(tuple(command), args.checkpoint, args.assume_gpu)
    return guarded(console, lambda: _run(question, environ, console))


def _with_variables(command: list[str]) -> tuple[dict[str, str], list[str]]:
    """The environment with what stands before the command, ``NAME=1 vllm serve ...`` as in a shell, and the rest."""
    environ, words = dict(os.environ), list(command)
    if words[:1] == ["env"]:
        words.pop(0)
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        environ[match[1]] = match[2]
        words.pop(0)
    return environ, words


def _run(question: Question, environ: Mapping[str, str], console: Console) -> int:
    report = examine(question, load_or_refuse(), environ, _progress(console))
    show(report, console)
    console.json(report.as_json())
    return _code(report)


def _code(report: Report) -> ExitCode:
    return ExitCode.OK if report.works else ExitCode.DIFFERENT


def _progress(console: Console) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if total > 20 and done % 20 == 0 and done < total:
            console.progress(f"reading headers: file {done} of {total}")

    return tell


def _capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)|(?:sm_?)?(\d+)(\d)[af]?", text.strip().lower())
    major = int(match[1] or match[3]) if match else 0
    if match is None or major < _OLDEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no compute capability; give 12.0 or sm120")
    return major, int(match[2] or match[4])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="doctor",
        usage="doctor [options] [-- vllm serve MODEL ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--checkpoint",
        default="",
        metavar="DIR",
        help="examine this checkpoint (default: the model of the command line)",
    )
    parser.add_argument(
        "--assume-gpu",
        type=_capability,
        metavar="12.0",
        help="judge for this compute capability instead of the GPUs here",
    )
    add_common_flags(parser)
    return parser
