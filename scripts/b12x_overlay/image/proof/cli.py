# SPDX-License-Identifier: Apache-2.0
"""The command line of docker/prove."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from b12x_overlay.bootstrap import SetupError
from b12x_overlay.console import (
    CommandError,
    Console,
    Parser,
    add_common_flags,
    console_from,
    guarded,
)
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image.proof import steps, tools
from b12x_overlay.paths import build_dir

_DESCRIPTION = """\
Prove docker/Dockerfile and scripts/build-image with buildah against a stand-in base that holds the real vllm wheel:
built twice with equal layers, labels, verify, tampering, refused bases, a b12x clash, export, the patched wheel. Needs
root on a Debian or Ubuntu machine; its images live in build/image-proof and go with it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``docker/prove`` and return its exit code."""
    parser = Parser(prog="docker/prove", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--install",
        action="store_true",
        help=f"apt-get install {' '.join(tools.PACKAGES)} if missing",
    )
    parser.add_argument(
        "--if-possible", action="store_true", help="end with 0 and the reason where it cannot run"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave build/image-proof with all its images"
    )
    add_common_flags(parser)
    args = parser.parse_args(argv)
    console = console_from(args)
    return guarded(console, lambda: _run(args, console))


def _run(args: argparse.Namespace, console: Console) -> int:
    reason = tools.impossible() or ("" if args.install or not tools.missing() else _not_installed())
    if reason and args.if_possible:
        console.say(f"SKIPPED: the image proof cannot run here: {reason}")
        return ExitCode.OK
    if reason:
        raise CommandError(f"the image proof cannot run here: {reason}", reason="impossible")
    tools.install()
    folder = build_dir() / "image-proof"
    _remove(folder)
    shop = tools.Workshop(folder)
    os.environ.update(shop.environment)  # for the engine that this process asks directly
    try:
        return _steps(steps.Seen(shop), console)
    except SetupError as error:
        raise CommandError(str(error), code=ExitCode.FAILED, reason="set-up") from error
    finally:
        if not args.keep:
            _remove(folder)


def _steps(seen: steps.Seen, console: Console) -> int:
    begin = time.monotonic()
    results: list[dict[str, Any]] = []
    for number, step in enumerate(steps.STEPS, 1):
        title = (step.__doc__ or step.__name__).splitlines()[0]
        console.progress(f"[{number}/{len(steps.STEPS)}] {title}")
        start = time.monotonic()
        try:
            text = step(seen)
        except AssertionError as error:
            console.error(f"{step.__name__}: {error}")
            console.json({"passed": False, "failed": step.__name__, "steps": results})
            return ExitCode.DIFFERENT
        results.append(
            {"step": step.__name__, "seen": text, "seconds": round(time.monotonic() - start, 1)}
        )
        console.say(f"  {console.paint('passed', 'green')} {results[-1]['seconds']} s: {text}")
    console.say(f"the image proof passed in {time.monotonic() - begin:.0f} s")
    console.json({"passed": True, "steps": results})
    return ExitCode.OK


def _not_installed() -> str:
    return f"{', '.join(tools.missing())} not installed (--install does it with apt-get)"


def _remove(folder: Path) -> None:
    """Remove the store; overlay mounts of an interrupted run would keep it busy."""
    if not folder.exists():
        return
    shop = tools.Workshop(folder)
    if not tools.missing():
        shop.buildah("umount", "--all", check=False)
    shutil.rmtree(folder, ignore_errors=True)
