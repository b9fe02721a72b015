#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times apply, status, verify and revert beside ``git am`` of the same series: whole processes, as ratios.

    scripts/test --run tests/apply/benchmarks/apply_vs_git_am.py [--runs 15]

Two targets: the unpacked source distribution (scripts/apply-patches fetches it) and vLLM's Python files as pip installs
them (scripts/test --setup-only makes them). ``git am`` works in a checkout of the same tree. The runs are interleaved, so that a busy machine slows all of them; printed are the
median, the middle half of the runs, and the ratio of medians to git am's. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(REPO / "scripts"), str(REPO / "tests")]

from b12x_overlay.patching import patchset, sources  # noqa: E402
from support import paths  # noqa: E402

COMMAND = [sys.executable, str(REPO / "scripts/apply-patches")]
GIT = [
    "git",
    "-c",
    "user.name=b",
    "-c",
    "user.email=b@example.invalid",
    "-c",
    "commit.gpgsign=false",
]
ENV = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--folder", help="where to work; default: the system's temporary folder")
    args = parser.parse_args()
    loaded = patchset.load(REPO / "patches", REPO / "overlay")
    with tempfile.TemporaryDirectory(prefix="b12x-overlay-bench-", dir=args.folder) as work:
        cases = prepare(Path(work), loaded)
        times: dict[str, list[float]] = {name: [] for name in cases}
        work_done: dict[str, list[float]] = {name: [] for name in cases}
        for run in range(args.runs + 1):
            for name, (before, command) in cases.items():
                before()
                start, used = time.perf_counter(), processor_time()
                done = subprocess.run(command, capture_output=True, check=False, env=ENV)
                spent = time.perf_counter() - start
                assert done.returncode in (0, 1), done.stderr.decode()
                if run:  # the first round warms the file cache
                    times[name].append(spent)
                    work_done[name].append(processor_time() - used)
    report(times, work_done, len(loaded.patches))
    return 0


def prepare(
    work: Path, loaded: patchset.PatchSet
) -> dict[str, tuple[Callable[[], object], list[str]]]:
    """What to run, and what to bring into order before each run."""
    source = sources.default_tree(loaded.pin)
    stock = paths.TEST_ENV / "stock"
    if not source.is_dir() or not stock.is_dir():
        raise SystemExit(
            f"needs {source} (scripts/apply-patches) and {stock} (scripts/test --setup-only)"
        )
    tree, site, checkout = work / "tree", work / "site", work / "checkout"
    shutil.copytree(source, tree)
    run([*COMMAND, "revert", "-q", "--target", str(tree)])
    shutil.copytree(tree, checkout)
    shutil.copytree(stock, site)
    for words in (
        ["init", "--quiet"],
        ["add", "--all", "--force"],
        ["commit", "--quiet", "--message", "vLLM"],
    ):
        run([*GIT, *words], cwd=checkout)
    series = [str(REPO / "patches" / f"{patch.name}.patch") for patch in loaded.patches]
    whole = [str(path) for path in with_overlay(work, checkout)]
    reset = [
        *GIT,
        "-C",
        str(checkout),
        "reset",
        "--quiet",
        "--hard",
        run([*GIT, "rev-parse", "HEAD"], cwd=checkout),
    ]

    def ours(verb: str, target: Path) -> list[str]:
        return [*COMMAND, verb, "--target", str(target)]

    def first(verb: str, target: Path) -> Callable[[], object]:
        return lambda: run([*ours(verb, target), "-q"])

    cases: dict[str, tuple[Callable[[], object], list[str]]] = {
        "git am": (
            lambda: run(reset),
            [*GIT, "-C", str(checkout), "am", "--quiet", "--keep-non-patch", *series],
        )
    }
    cases["git am, overlay in the patches"] = (
        lambda: run(reset),
        [*GIT, "-C", str(checkout), "am", "--quiet", *whole],
    )
    for name, target in (("source tree", tree), ("installed", site)):
        cases[f"{name}: apply"] = (first("revert", target), ours("apply", target))
        cases[f"{name}: apply again"] = (lambda: None, ours("apply", target))
        cases[f"{name}: status"] = (lambda: None, ours("status", target))
        cases[f"{name}: verify"] = (lambda: None, ours("verify", target))
        cases[f"{name}: revert"] = (lambda: None, ours("revert", target))
    cases["git status, for comparison"] = (
        lambda: None,
        [*GIT, "-C", str(checkout), "status", "--porcelain"],
    )
    return cases


def with_overlay(work: Path, checkout: Path) -> list[Path]:
    """The series as patches that also hold the overlay files: what git needs for the same result as apply's."""
    clone = work / "clone"
    run([*GIT, "clone", "--quiet", str(checkout), str(clone)])
    for key in ("name", "email"):
        run([*GIT, "config", f"user.{key}", "b@example.invalid"], cwd=clone)
    run([*COMMAND, "--commit", "-q", "--target", str(clone)])
    out = run(
        [*GIT, "format-patch", "--quiet", "-o", str(work / "whole"), "origin/HEAD"], cwd=clone
    )
    assert not out
    return sorted((work / "whole").iterdir())


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a step that is not timed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=ENV)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def processor_time() -> float:
    """Seconds of processor time that finished child processes have used: steadier than the clock on a busy machine."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(times: dict[str, list[float]], work_done: dict[str, list[float]], patches: int) -> None:
    """Print the table."""
    base, base_work = statistics.median(times["git am"]), statistics.median(work_done["git am"])
    print(
        f"{patches} patches, {len(times['git am'])} runs, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}"
    )
    print(
        f"{'':32}{'median':>9}  {'middle half':>17}  {'to git am':>9}  {'processor':>9}  {'to git am':>9}"
    )
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        spent = statistics.median(work_done[name])
        print(
            f"{name:32}{median * 1e3:6.0f} ms  {low * 1e3:6.0f}..{high * 1e3:4.0f} ms  {median / base:9.2f}"
            f"  {spent * 1e3:6.0f} ms  {spent / base_work:9.2f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
