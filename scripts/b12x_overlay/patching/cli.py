# SPDX-License-Identifier: Apache-2.0
"""The command line of scripts/apply-patches."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from b12x_overlay import console as consoles
from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import again, engine, patchset, report
from b12x_overlay.patching.patchset import PatchSet, PatchSetError
from b12x_overlay.patching.sources import default_tree
from b12x_overlay.patching.target import FolderTarget, at_folder
from b12x_overlay.paths import OVERLAY, PATCHES, REPO

_VERBS = """verbs:
  apply    fetch vLLM's pinned source distribution if no target is given, then apply overlay and patches (default)
  revert   bring the original bytes back and remove the overlay files
  status   say per patch and file what the target holds, read from its bytes; writes nothing
  verify   status, and derive the original bytes back from what is there; writes nothing
  list     the patches, why they are there, their files and numbers of changed lines
  export   maintainers: write a git checkout's commits (one per patch) back to patches/ and its hashes
  bump     maintainers: say how each patch stands on another vLLM (a version, a folder, a .tar.gz or a .whl)

targets:
  none       build/sources/vllm-VERSION, fetched and unpacked on the first run
  PATH       the top folder of a source tree or git checkout, or a folder with an installed package
  installed  the vllm that this Python imports (found without importing it)
  FILE.whl   apply writes a new wheel with the local version +b12x.N; status, verify and --dry-run read only

"""


def parser() -> argparse.ArgumentParser:
    """The argument parser; ``--help`` is the command's manual."""
    made = consoles.Parser(
        prog="scripts/apply-patches",
        description="Apply this project's patch set and overlay to vLLM, check it, take it off again.",
        epilog=_VERBS + consoles.EXIT_CODE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = ("apply", "revert", "status", "verify", "list", "export", "bump")
    made.add_argument(
        "verb", nargs="?", default="apply", choices=verbs, metavar="VERB", help="see below"
    )
    made.add_argument("other", nargs="?", metavar="OTHER", help="bump: the other vLLM")
    made.add_argument("--target", metavar="TARGET", help="what to work on, see below")
    made.add_argument(
        "--commit", action="store_true", help="apply: one commit per patch in a git checkout"
    )
    made.add_argument(
        "--output", type=Path, metavar="DIR", help="apply to a wheel: where the new one goes"
    )
    made.add_argument(
        "--dry-run",
        action="store_true",
        help="no side effect at all; exit 1 if something would change",
    )
    consoles.add_common_flags(made)
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    made = parser()
    args = made.parse_args(argv)
    _check_usage(made, args)
    console = consoles.console_from(args)
    return consoles.guarded(console, lambda: _run(args, console))


def _check_usage(made: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    wheel = bool(args.target) and args.target.endswith(".whl")
    if (args.other is not None) != (args.verb == "bump"):
        made.error("bump needs the other vLLM (a version, a folder, a .tar.gz or a .whl)" if args.verb == "bump" else
                   f"{args.verb} takes no argument {args.other!r}; did you mean --target {args.other}?")  # fmt: skip
    if args.commit and (args.verb != "apply" or wheel):
        made.error("--commit goes with apply on a git checkout")
    if args.target == "installed" and (args.commit or args.verb == "export"):
        made.error("give the checkout's folder as --target; 'installed' depends on the Python")
    if args.output is not None and not (wheel and args.verb == "apply"):
        made.error("--output goes with apply --target FILE.whl")
    if args.verb == "export" and not args.target:
        made.error("export needs --target CHECKOUT")
    if args.target == "":
        made.error("--target is empty")
    if args.target and args.verb in ("list", "bump"):
        made.error(
            f"{args.verb} takes no --target"
            + ("" if args.verb == "bump" else "; status says what a target holds")
        )


def _run(args: argparse.Namespace, console: Console) -> int:
    verbs: dict[str, Callable[[argparse.Namespace, Console, PatchSet], int]] = {
        "list": _list,
    }
    if args.verb == "export":
        from b12x_overlay.patching import export

        return export.command(args, console)
    try:
        patch_set = patchset.load(PATCHES, OVERLAY)
    except PatchSetError as error:
        raise CommandError(
            str(error),
            code=ExitCode.FAILED,
            reason="bad-patch-set",
            hint=f"git -C {shlex.quote(str(REPO))} status -- patches overlay says what was edited or removed",
        ) from error
    if args.verb == "bump":
        from b12x_overlay.patching import bump

        return bump.command(args, console, patch_set)
    return verbs.get(args.verb, _on_target)(args, console, patch_set)


def _list(args: argparse.Namespace, console: Console, patch_set: PatchSet) -> int:
    from b12x_overlay.patching import listing

    return listing.command(args, console, patch_set)


def _on_target(args: argparse.Namespace, console: Console, patch_set: PatchSet) -> int:
    if args.target and args.target.endswith(".whl"):
        from b12x_overlay.patching import wheel

        return wheel.command(args, console, patch_set)
    target = _folder(args, console, patch_set)
    if target is None:
        return _not_fetched(args, console, patch_set)
    if args.commit:
        from b12x_overlay.patching import gitrepo

        return gitrepo.command(args, console, patch_set, target)
    if args.verb == "apply":
        outcome = engine.apply(target, patch_set, dry_run=args.dry_run, say=console.progress)
    elif args.verb == "revert":
        outcome = engine.revert(target, patch_set, dry_run=args.dry_run, say=console.progress)
    else:
        outcome = (
            engine.verify(target, patch_set)
            if args.verb == "verify"
            else engine.status(target, patch_set)
        )
    report.show(console, outcome, patch_set, describe(target), _next_step(args, outcome, target))
    return int(outcome.code)


def _folder(args: argparse.Namespace, console: Console, patch_set: PatchSet) -> FolderTarget | None:
    if args.target == "installed":
        from b12x_overlay.patching import installed

        return installed.find()
    if args.target:
        return at_folder(Path(args.target).expanduser())
    if args.verb == "apply" and not args.dry_run:
        from b12x_overlay.patching import fetch

        return at_folder(fetch.pinned_tree(patch_set.pin, console.progress))
    tree = default_tree(patch_set.pin)
    return at_folder(tree) if tree.is_dir() else None


def _not_fetched(args: argparse.Namespace, console: Console, patch_set: PatchSet) -> int:
    tree = default_tree(patch_set.pin)
    console.json(
        {"command": args.verb, "target": {"kind": "tree", "path": str(tree), "version": None}, "state": "not-fetched",
         "outcome": "not fetched", "exit": int(ExitCode.DIFFERENT), "next": "scripts/apply-patches"}
    )  # fmt: skip
    console.say(f"{tree} does not exist: vLLM {patch_set.pin.version} is not fetched yet")
    console.say("next: scripts/apply-patches fetches and patches it; --target names another vLLM")
    return int(ExitCode.OK if args.verb == "revert" else ExitCode.DIFFERENT)


def describe(target: FolderTarget) -> dict[str, Any]:
    """The target for reports."""
    return {"kind": target.kind, "path": target.label, "version": target.version}


def _next_step(args: argparse.Namespace, outcome: engine.Outcome, target: FolderTarget) -> str:
    if outcome.code is ExitCode.REFUSED:
        return ""
    apply = again.command("apply", args.target)
    if outcome.outcome == "interrupted" or outcome.outcome.startswith("would"):
        return again.command("revert", args.target) if args.verb == "revert" else apply
    if args.verb == "revert":
        return f"{apply} applies the set again"
    if outcome.code is not ExitCode.OK:
        return f"{apply} applies the set" if report.settled_by_apply(outcome) else ""
    if target.kind == "installed":
        return "restart the servers that import this vLLM"
    if not args.target:
        return (
            "scripts/test proves it; to patch the vLLM that serves: /path/to/python scripts/apply-patches "
            "--target installed"
        )
    return f"install from {target.label}, or restart the servers that run from it"
