# SPDX-License-Identifier: Apache-2.0
"""scripts/convert-csf: argument parsing and the text around the five things it does."""

from __future__ import annotations

import argparse
from pathlib import Path

from b12x_overlay.console import (
    EXIT_CODE_HELP,
    CommandError,
    Console,
    Parser,
    add_common_flags,
    console_from,
    guarded,
)
from b12x_overlay.csf import convert, info, restore, serving, source
from b12x_overlay.csf.core import container, readable
from b12x_overlay.exitcodes import ExitCode

_DESCRIPTION = """\
Convert an ordinary ModelOpt NVFP4 mixture-of-experts checkpoint into a CSF container: the experts' block scales take
about half their bytes, losslessly, and everything else is kept byte for byte. The source is only read. DST appears
when it is whole; an interrupted run is continued by giving the same command again.
"""
_EXAMPLES = """\
examples:
  scripts/convert-csf /models/GLM-5.3-Flash-NVFP4 /models/GLM-5.3-Flash-CSF
  scripts/convert-csf --verify /models/GLM-5.3-Flash-CSF
  scripts/convert-csf --serving-folder /models/GLM-5.3-Flash-CSF /models/GLM-5.3-Flash-CSF-serve
  scripts/convert-csf --restore /models/GLM-5.3-Flash-CSF /models/GLM-5.3-Flash-restored

"""


def main(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    needs_target = args.action in ("convert", "restore", "serving-folder")
    if needs_target and args.dst is None:
        parser.error("DST is needed")
    if not needs_target and args.dst is not None:
        parser.error(f"--{args.action} takes one folder")
    console = console_from(args)
    return guarded(console, lambda: _run(args, console))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="convert-csf",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + EXIT_CODE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_mutually_exclusive_group()
    for action, text in (
        ("restore", "container SRC back to the ordinary checkpoint DST, bit for bit"),
        ("verify", "prove container SRC: decode every shard, compare every recorded hash"),
        ("info", "sizes per layer of SRC (container, index layout or ordinary checkpoint)"),
        ("serving-folder", "write the folder DST that vLLM serves container SRC from"),
    ):
        actions.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=text
        )
    parser.set_defaults(action="convert")
    parser.add_argument("src", metavar="SRC", type=Path)
    parser.add_argument("dst", metavar="DST", type=Path, nargs="?")
    parser.add_argument("--family", help="family name in the manifest; default: <model_type>_nvfp4")
    parser.add_argument(
        "--revision", default="", help="the source's revision, recorded in the manifest"
    )
    add_common_flags(parser)
    return parser


def _run(args: argparse.Namespace, console: Console) -> int:
    src: Path = args.src.absolute()
    _check_source(args.action, src)
    if args.action == "verify":
        return _verify(src, console)
    if args.action == "info":
        console.json(info.show(src, console))
        return ExitCode.OK
    dst: Path = args.dst.absolute()
    if args.action == "restore":
        done = restore.restore(src, dst, console)
        console.say(f"{dst}: {done['shards']} shards, every SHA-256 as recorded")
    elif args.action == "serving-folder":
        done = serving.write_serving_folder(src, dst, console)
        console.say(str(done["command"]))
    else:
        checkpoint = source.open_source(src)
        family = args.family or _family(checkpoint.config)
        done = convert.convert(checkpoint, dst, console, family=family, revision=args.revision)
        console.say(
            f"{dst}: {done['scale_tensors']} scale tensors, {readable(done['scale_bytes'])} -> "
            f"{readable(done['compressed_bytes'])} ({100 * done['ratio']:.1f} %)"
        )
    console.json({"action": args.action, "src": str(src), "dst": str(dst), **done})
    return ExitCode.OK


def _check_source(action: str, src: Path) -> None:
    """Tell a wrong SRC, which is the caller's slip, from a checkpoint that is at fault.

    Raises:
        CommandError: no such folder, or one without anything of a container where a container is needed.
    """
    if not src.is_dir():
        what = "not a folder" if src.exists() else "no such folder"
        raise CommandError(
            f"{src}: {what}",
            code=ExitCode.USAGE,
            reason="usage",
            hint="give SRC as it lies on disk",
        )
    needs_container = action in ("restore", "verify", "serving-folder")
    parts = (container.MANIFEST, container.CONTRACT, "tensors")
    if needs_container and not any((src / part).exists() for part in parts):
        raise CommandError(
            f"{src}: not a CSF container, there is no {', '.join(parts[:-1])} or {parts[-1]} in it",
            code=ExitCode.USAGE,
            reason="usage",
            hint=f"--{action} takes the folder that convert-csf SRC DST wrote",
        )


def _verify(src: Path, console: Console) -> int:
    faults = restore.verify(src, console)
    console.json({"action": "verify", "src": str(src), "ok": not faults, "faults": faults})
    for fault in faults:
        console.say(console.paint(fault, "red"))
    if faults:
        console.say(f"{src}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}")
        return ExitCode.DIFFERENT
    console.say(f"{src}: every shard decodes to its source, bit for bit")
    return ExitCode.OK


def _family(config: dict[str, object]) -> str:
    text = config.get("text_config")
    model_type = text.get("model_type") if isinstance(text, dict) else None
    return f"{model_type or config.get('model_type') or 'unknown'}_nvfp4"
