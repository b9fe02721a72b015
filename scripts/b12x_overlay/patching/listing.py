# SPDX-License-Identifier: Apache-2.0
"""The verb list: what is patched and why, and how many upstream lines that changes."""

from __future__ import annotations

import argparse
from typing import Any

from b12x_overlay.console import Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import manifest
from b12x_overlay.patching.patchset import PatchSet


def changed_lines(patch_set: PatchSet) -> dict[str, tuple[int, int]]:
    """Per patch the upstream lines it adds and removes."""
    return {patch.name: (patch.added, patch.removed) for patch in patch_set.patches}


def command(_args: argparse.Namespace, console: Console, patch_set: PatchSet) -> int:
    """Print the list."""
    counts = changed_lines(patch_set)
    added, removed = (sum(count[i] for count in counts.values()) for i in (0, 1))
    console.json(_document(patch_set, added, removed))
    pin = patch_set.pin
    console.say(f"vLLM {pin.version} ({pin.commit}), patch set {manifest.patchset_id(patch_set)}")
    for number, patch in enumerate(patch_set.patches, 1):
        console.say()
        console.say(
            console.paint(f"[{number}/{len(patch_set.patches)}] {patch.name}", "bold")
            + f"  +{patch.added} -{patch.removed}"
        )
        console.say(f"  what   {patch.what}")
        console.say(f"  why    {patch.why}")
        console.say(f"  until  {patch.until}")
        for file in patch.files:
            diff = patch.diff_of(file.path)
            console.say(f"  file   {file.path}  +{diff.added} -{diff.removed}")
        for overlay in patch.overlay:
            console.say(f"  adds   {overlay.path}")
    for path in patch_set.unclaimed:
        console.say(f"warning: overlay/{path} belongs to no patch and is not applied")
    console.say()
    console.say(
        f"{len(patch_set.patches)} patches change {added + removed} upstream lines (+{added} -{removed}) in "
        f"{len(patch_set.chains)} files and add {len(patch_set.overlay)} files"
    )
    return ExitCode.OK


def _document(patch_set: PatchSet, added: int, removed: int) -> dict[str, Any]:
    document = manifest.build(patch_set)
    rows = [
        row
        | {
            "what": patch.what, "why": patch.why, "until": patch.until, "fragments": list(patch.fragments),
            "added": patch.added, "removed": patch.removed,
        }
        for row, patch in zip(document["patches"], patch_set.patches, strict=True)
    ]  # fmt: skip
    return {
        **document,
        "patches": rows,
        "added": added,
        "removed": removed,
        "unclaimed": list(patch_set.unclaimed),
    }
