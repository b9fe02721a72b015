# SPDX-License-Identifier: Apache-2.0
"""The command line of ``verify``: is the vLLM of this image (or environment) stock, patched, or modified?"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from b12x_overlay.console import Console, Parser, add_common_flags, console_from, guarded
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.image import integrity, manifest
from b12x_overlay.image.expected import Expected, load_or_refuse
from b12x_overlay.image.integrity import Fault, State, Verdict

SCHEMA = "b12x-overlay-verify/1"

_DESCRIPTION = """\
Say whether the vllm that this Python would import is stock, patched or modified, with the files that differ. Compares
bytes: no import of vllm or torch, no network, no GPU. With a manifest beside the program (in the image) its files and
the program itself are checked too. Compare the content id with the image's label
b12x-overlay.content-id and its tag: they must be the same.
"""

_EPILOG = """\
exit codes:
  0    patched, and every file is as it should be
  1    stock, modified, another version, or no vllm
  2    usage
  4    unexpected failure
  130  interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``verify`` and return its exit code."""
    parser = Parser(
        prog="verify",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--manifest", type=Path, help="default: manifest.json beside the program, if there is one"
    )
    add_common_flags(parser)
    args = parser.parse_args(argv)
    console = console_from(args)
    return guarded(console, lambda: _run(args.manifest, console))


def _run(path: Path | None, console: Console) -> int:
    expected = load_or_refuse()
    verdict = integrity.full(expected)
    beside = _beside()
    document, faults = None, list(verdict.faults)
    if path is not None or beside is not None:
        document, more = _check_manifest(path or beside or Path(), verdict, expected)
        faults += [fault for fault in more if fault.path not in {known.path for known in faults}]
    state = State.MODIFIED if faults else verdict.state
    _show(state, verdict, faults, document, console)
    console.json(
        {
            "schema": SCHEMA,
            "state": state.value,
            "version": verdict.version,
            "folder": str(verdict.folder) if verdict.folder else None,
            "patchset": expected.patchset if state is State.PATCHED else None,
            "content_id": document["content_id"] if document else None,
            "files": verdict.files,
            "faults": [{"path": fault.path, "what": fault.what} for fault in faults],
        }
    )
    return ExitCode.OK if state is State.PATCHED else ExitCode.DIFFERENT


def _beside() -> Path | None:
    """The manifest in the folder that holds this program, if it runs from one."""
    archive = getattr(globals().get("__loader__"), "archive", None)
    path = Path(archive).resolve().parent / manifest.NAME if archive else None
    return path if path is not None and path.exists() else None


def _check_manifest(
    path: Path, verdict: Verdict, expected: Expected
) -> tuple[dict[str, Any] | None, list[Fault]]:
    try:
        document = manifest.read(path)
    except manifest.ManifestError as error:
        return None, [Fault(str(path), str(error).removeprefix(f"{path}: "))]
    faults = []
    if document["inputs"]["patchset"]["patchset"] != expected.patchset:
        faults.append(
            Fault(str(path), f"of another patch set than this program ({expected.patchset})")
        )
    if document["inputs"]["architecture"] != platform.machine():
        faults.append(
            Fault(
                str(path), f"for {document['inputs']['architecture']}, this is {platform.machine()}"
            )
        )
    for entry in document["files"]:
        # The manifest cannot hold its own digest.
        if entry["sha256"] and integrity.digest(Path(entry["path"])) != entry["sha256"]:
            found = "edited" if Path(entry["path"]).exists() else "missing"
            faults.append(Fault(entry["path"], found))
    if verdict.site is not None:
        relative = {str(verdict.site / fault.path): fault for fault in verdict.faults}
        faults = [fault for fault in faults if fault.path not in relative]
    return document, faults


def _show(
    state: State,
    verdict: Verdict,
    faults: list[Fault],
    document: dict[str, Any] | None,
    console: Console,
) -> None:
    for fault in faults:
        console.say(f"{console.paint(fault.what, 'red')}: {fault.path}")
    if document is not None:
        inputs = document["inputs"]
        base = inputs["base"]
        console.say(f"content id  {document['content_id']}")
        console.say(
            f"patch set   {inputs['patchset']['patchset']} for vLLM {inputs['patchset']['pin']['version']}"
        )
        console.say(f"base        {base['name']} {base['digest'] or '(digest not recorded)'}")
        console.say(f"b12x        {document['found']['b12x']['label']}")
        console.say(f"status      {inputs['architecture']}: {inputs['status']}")
    where = f" in {verdict.folder}" if verdict.folder else ""
    texts = {
        State.PATCHED: f"patched: vllm {verdict.version}{where}, {verdict.files} files compared",
        State.STOCK: f"stock: vllm {verdict.version}{where}, without the patch set",
        State.MODIFIED: f"modified: vllm {verdict.version}{where}, {len(faults)} files differ",
        State.OTHER_VERSION: f"another version: vllm {verdict.version}{where}",
        State.ABSENT: f"no vllm is installed for {sys.executable}",
    }
    console.say(console.paint(texts[state], "green" if state is State.PATCHED else "red"))
