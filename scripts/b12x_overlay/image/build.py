# SPDX-License-Identifier: Apache-2.0
"""The command line of ``scripts/build-image``."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path

from b12x_overlay.console import (
    CommandError,
    Console,
    Parser,
    add_common_flags,
    console_from,
    guarded,
)
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image import check, content, engines, expected, plan, programs, receipt
from b12x_overlay.image.content import ContentError
from b12x_overlay.image.engines import Engine
from b12x_overlay.patching.patchset import PatchSetError

_DESCRIPTION = """\
Build the beta image: vllm/vllm-openai:v0.33.0 with this repository's patch set in it, with whichever of docker buildx,
docker, podman and buildah works here. The base's digests are looked up and recorded, the base is refused if a single
file differs from the pinned vLLM, and the finished image is inspected and verifies itself.
"""

_EPILOG = """\
examples:
  build-image --print                     the plan, and the command that would run
  build-image                             build and check
  build-image --output dist               also write OCI archive, SBOM and receipt to dist/
  build-image --arch arm64                for DGX Spark (on an arm64 machine, or with emulation set up)
  build-image --programs DIR              only write the programs verify and doctor to DIR

exit codes:
  0    built and checked (--print: the plan is complete)
  1    the image is not what was planned (--print: the base's digest is not known)
  2    usage
  3    refused: a base of another architecture or version, no engine, files in the way
  4    the build or a download failed
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``build-image`` and return its exit code."""
    args = _parser().parse_args(argv)
    console = console_from(args)
    return guarded(console, lambda: _guarded(args, console))


def _guarded(args: argparse.Namespace, console: Console) -> int:
    try:
        return _run(args, console)
    except (ContentError, PatchSetError) as error:
        raise CommandError(
            str(error), reason="inputs", hint="run scripts/apply-patches list"
        ) from error


def _run(args: argparse.Namespace, console: Console) -> int:
    if args.programs is not None:
        return _programs(args.programs, console)
    engine = _engine(args)
    arch = args.arch or content.ARCHITECTURES.get(platform.machine(), "amd64")
    settled = plan.make(args.base, arch, args.line, args.name, args.date, args.source, engine)
    for note in settled.notes:
        console.progress(f"{console.paint('note:', 'yellow')} {note}")
    if args.print:
        plan.describe(settled, engine, console.say)
        command = engine.build_command(settled.request()) if engine else None
        console.json(
            {**settled.as_json(), "engine": engine.name if engine else None, "command": command}
        )
        return ExitCode.OK if settled.resolved else ExitCode.DIFFERENT
    assert engine is not None
    if not settled.resolved:
        raise CommandError(
            f"the digest of {settled.base.name} is not known: {settled.notes[-1]}",
            reason="base-digest",
            hint="give --base NAME@sha256:...",
        )
    return _build(args, settled, engine, console)


def _engine(args: argparse.Namespace) -> Engine | None:
    try:
        return engines.choose(args.engine)
    except CommandError:
        if args.print and args.engine == "auto":
            return None
        raise


def _build(args: argparse.Namespace, settled: plan.Plan, engine: Engine, console: Console) -> int:
    if args.output is not None:
        receipt.refuse_existing(settled, args.output)  # before minutes of work
    console.progress(f"building {settled.image} with {engine.version()}")
    engines.run_build(engine, settled.request())
    can_run = settled.architecture == platform.machine()
    info, verdict = check.check(settled, engine, can_run)
    result = {
        **settled.as_json(),
        "engine": engine.name,
        "image_id": info.id,
        "verify": verdict["state"],
    }
    if args.output is not None:
        document = receipt.export(
            settled, engine, info, verdict, args.output, not args.no_sbom, console
        )
        result["files"] = document["files"]
        for entry in ("archive", "sbom"):
            if entry in document["files"]:
                console.say(f"{entry:<11} {args.output / document['files'][entry]['file']}")
    console.say(f"image       {settled.image}")
    console.say(f"content id  {settled.content_id}")
    state = "not run: this machine is another architecture" if not can_run else verdict["state"]
    console.say(f"verify      {state}")
    console.say(f"base        {settled.base.name}@{settled.base.digest}")
    console.say("roll back   run the previous tag; images share no kernel caches")
    console.json(result)
    return ExitCode.OK


def _programs(folder: Path, console: Console) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = programs.write(folder, expected.from_checkout())
    except (FileExistsError, NotADirectoryError) as error:
        raise CommandError(
            f"{error.filename} is in the way: {error.strerror}",
            reason="exists",
            hint="move it away, or give --programs another folder",
        ) from error
    except OSError as error:
        raise CommandError(
            f"{error.filename or folder} cannot be written: {error.strerror}",
            code=ExitCode.FAILED,
            reason="io",
            hint="give --programs a folder that can be written",
        ) from error
    for name in made:
        console.say(str(folder / name))
    console.json({"programs": {name: str(folder / name) for name in made}})
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/build-image",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--base",
        default=plan.DEFAULT_BASE,
        metavar="IMAGE",
        help="name:tag or name@sha256:... (default: %(default)s)",
    )
    parser.add_argument(
        "--arch", choices=sorted(content.ARCHITECTURES.values()), help="default: this machine's"
    )
    parser.add_argument(
        "--engine", choices=("auto", *(e.name for e in engines.ENGINES)), default="auto"
    )
    parser.add_argument(
        "--name", default=plan.DEFAULT_NAME, metavar="REPOSITORY", help="default: %(default)s"
    )
    parser.add_argument("--line", default="", help=f"first part of the tag (default: {plan.LINE})")
    parser.add_argument(
        "--date", default="", metavar="YYYYMMDD", help="of the tag (default: of the commit)"
    )
    parser.add_argument(
        "--source",
        default="",
        metavar="URL",
        help="for the source label (default: origin's address)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="also write OCI archive, SBOM and receipt"
    )
    parser.add_argument("--no-sbom", action="store_true", help="export without an SBOM")
    stop = parser.add_mutually_exclusive_group()
    stop.add_argument("--print", action="store_true", help="show the plan and build nothing")
    stop.add_argument(
        "--programs", type=Path, metavar="DIR", help="write verify and doctor to DIR and stop"
    )
    add_common_flags(parser)
    return parser
