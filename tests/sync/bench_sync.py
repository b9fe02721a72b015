#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time a sync of many commits beside a plain git cherry-pick of the same commits.

    scripts/test --run tests/sync/bench_sync.py [--commits 500] [--fragments 100] [--runs 5]

Whole processes, from start to end, in turn: the command (with its checks, tree report and the moved ref), and
``git cherry-pick -x`` of the same commits in a checkout of beta. Prints medians with their spread and the ratio, of
the clock and of the processors' time, which tells more on a machine that others use too.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[2] / "scripts"),
]

from sync.repos import COMMAND, Repo, one_fragment  # noqa: E402 (needs the paths)


def build(path: Path, commits: int, fragments: int, beta_only: int, files: int) -> Repo:
    """A repository with *files* files, *commits* changes on canonical (some with a fragment), some of beta's own."""
    text = "".join(f"value_{number} = {number}\n" for number in range(200))
    repo = Repo.create(path, {f"package/module_{number}.py": text for number in range(files)})
    for branch, count, first in (("main", commits, 0), ("beta", beta_only, 150)):
        repo.on(branch)
        for number in range(count):
            module = f"package/module_{number % files}.py"
            lines = (repo.path / module).read_text().split("\n")
            lines[first + number // files] = f"{branch} = {number}"
            changed = {module: "\n".join(lines)}
            if (
                branch == "main"
                and number % max(1, commits // fragments) == 0
                and number * fragments < commits * fragments
            ):
                changed |= one_fragment(f"vllm-change-{number}")
            repo.commit(f"{branch} change {number}", changed)
    repo.git("switch", "-q", "--detach")
    return repo


def timed(command: list[str], repo: Repo) -> tuple[float, float]:
    """Wall-clock and CPU seconds (all its processes) of a command."""
    env = {key: value for key, value in repo.env.items() if not key.startswith("GIT_AUTHOR")}
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=repo.path, env=env, capture_output=True, text=True, check=False
    )
    spent = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command[:3])} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def show(name: str, times: list[tuple[float, float]]) -> str:
    parts = []
    for kind, values in zip(("wall", "CPU"), zip(*times, strict=True), strict=True):
        parts.append(
            f"{kind} {statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})"
        )
    return f"{name:<26} {'   '.join(parts)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commits", type=int, default=500)
    parser.add_argument("--fragments", type=int, default=100)
    parser.add_argument("--beta-only", type=int, default=50, help="commits of beta's own")
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-sync-"))
    try:
        repo = build(folder / "repo", args.commits, args.fragments, args.beta_only, args.files)
        count = len(repo.git("ls-tree", "--name-only", "main", "changes/").split())
        old = repo.tip("beta")
        print(
            f"{args.commits} commits, {count} fragments, {args.beta_only} commits of beta's own, {repo.git('version')}"
        )
        sync: list[tuple[float, float]] = []
        plain: list[tuple[float, float]] = []
        for run in range(args.runs):
            repo.git("branch", "-qf", "beta", old)
            repo.git("switch", "-q", "--detach", "main")
            sync.append(
                timed(
                    [*COMMAND, "--repo", ".", "--canonical", "main", "--beta", "beta", "--land"],
                    repo,
                )
            )
            synced = repo.tip("beta^^{tree}")
            repo.git("switch", "-q", "--detach", old)
            plain.append(
                timed(
                    ["git", "cherry-pick", "-x", f"{repo.git('merge-base', 'main', old)}..main"],
                    repo,
                )
            )
            if repo.tip("HEAD^{tree}") != synced:
                raise SystemExit("the two ways end with different trees")
            print(
                f"run {run + 1}: sync {sync[-1][0]:.2f} s, cherry-pick {plain[-1][0]:.2f} s",
                flush=True,
            )
        print("medians (least to most):")
        print(show("scripts/sync-beta --land", sync))
        print(show("git cherry-pick -x", plain))
        for at, kind in enumerate(("wall", "CPU")):
            ratio = statistics.median(one[at] for one in sync) / statistics.median(
                one[at] for one in plain
            )
            print(f"ratio of medians, {kind:<4}     {ratio:6.2f}")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
