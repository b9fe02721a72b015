# SPDX-License-Identifier: Apache-2.0
"""scripts/test: make the test environment, then run pytest in it with the given arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from b12x_overlay import bootstrap
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.paths import REPO, build_dir
from b12x_overlay.testenv import sites

USAGE = """\
usage: scripts/test [--setup-only | --run PROGRAM] [arguments]

Makes the test environment under build/ on first use (Python packages, vLLM 0.33.0's Python code, both b12x
providers, the patched tree; about 2 GB, a few minutes) and runs pytest in it. Examples:

  scripts/test                 everything that this machine can run
  scripts/test -m rows         one part: apply, rows, csf, image, sync, qualify, gpu
  scripts/test --setup-only    only make the environment; prints its interpreter
  scripts/test --run tests/sync/bench_sync.py --runs 3
                               a benchmark of tests/ in that environment, with the patched vLLM

On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves 3 GB of CUDA libraries.
Exit codes: pytest's own, or 4 where the environment cannot be made.
"""


def _become_pytest(python: Path, argv: list[str]) -> NoReturn:
    os.chdir(REPO)
    os.execve(python, [str(python), "-m", "pytest", *argv], environment(python))


def _become_program(python: Path, argv: list[str]) -> NoReturn:
    """Run a program of tests/ that is no test, with the paths that conftest.py gives the tests."""
    site = build_dir() / "test-env"
    paths = [site / "patched", site / "b12x-flashinfer", REPO / "scripts", REPO / "tests"]
    env = environment(python) | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    os.execve(python, [str(python), *argv], env)


def main(argv: list[str]) -> int:
    """Set up, then replace this process by pytest or a program; returns on ``--help``, ``--setup-only`` or failure."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return ExitCode.OK
    if argv[:1] == ["--run"] and not (argv[1:] and Path(argv[1]).is_file()):
        print("error: --run wants a program, for example tests/sync/bench_sync.py", file=sys.stderr)
        return ExitCode.USAGE
    if argv[:1] == ["--run"] and "__main__" not in Path(argv[1]).read_text(errors="replace"):
        print(f"error: {argv[1]} is no program; see tests/README.md", file=sys.stderr)
        return ExitCode.USAGE
    try:
        python = bootstrap.ensure("test")
        sites.ensure_all()
    except bootstrap.SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    if argv[:1] == ["--setup-only"]:
        print(python)
        return ExitCode.OK
    if argv[:1] == ["--run"]:
        _become_program(python, argv[1:])
    _become_pytest(python, argv)


def environment(python: Path) -> dict[str, str]:
    """The environment variables that the tests run under."""
    env = dict(os.environ)
    env.pop("PYTHONHOME", None)
    env.pop("PYTHONPATH", None)  # tests/conftest.py and support.child choose the trees
    env["PATH"] = os.pathsep.join((str(python.parent), env.get("PATH", os.defpath)))
    env["PYTHONDONTWRITEBYTECODE"] = ""  # vLLM imports take twice as long without bytecode
    env.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    return env
