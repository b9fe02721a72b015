# SPDX-License-Identifier: Apache-2.0
"""export's second half: overlay files that were edited in the checkout come back to overlay/."""

from __future__ import annotations

from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.patching import patchset
from b12x_overlay.patching.entry import Entry
from b12x_overlay.patching.gitrepo import Checkout
from b12x_overlay.patching.instep import InStep
from b12x_overlay.paths import OVERLAY, PATCHES


def overlay_back(
    made: Checkout, claims: dict[str, tuple[str, ...]], in_step: InStep
) -> tuple[dict[Path, bytes], dict[str, bytes]]:
    """Overlay files edited in the checkout, and those that are the same here; edited on both sides is refused."""
    listed = made.run("ls-tree", "-r", "-z", "HEAD", "--", "vllm").decode(errors="surrogateescape")
    files = [line.split("\t", 1) for line in listed.split("\0")[:-1]]
    _refuse_deleted(made, claims, in_step, {path for _, path in files})
    result: dict[Path, bytes] = {}
    same: dict[str, bytes] = {}
    for described, path in files:
        if not any(claimed(path, names) for names in claims.values()):
            continue
        if not described.startswith("100"):
            raise CommandError(
                f"{path} in {made.root} is no plain file (mode {described[:6]}): overlay files are",
                reason="bad-overlay",
            )
        theirs = made.read(path)
        assert isinstance(theirs, Entry)
        place = OVERLAY / path
        name = below(place)
        mine = patchset.sha256(place.read_bytes()) if place.exists() else None
        if theirs.sha256 == mine:
            same[name] = theirs.data
        elif in_step.knows(name, mine):
            result[place] = theirs.data
        elif not in_step.knows(name, theirs.sha256):
            raise CommandError(
                f"overlay/{path} differs from the checkout's {path}, and both differ from what was applied or exported",
                reason="overlay-conflict",
                hint=f"merge them by hand (diff {place} {made.root / path}), put the result into both places, commit it "
                "there, export again",
            )
    return result, same


def _refuse_deleted(
    made: Checkout, claims: dict[str, tuple[str, ...]], in_step: InStep, there: set[str]
) -> None:
    for name in in_step.hashes:
        path = name.removeprefix("overlay/")
        listed = any(claimed(path, names) for names in claims.values())
        if path != name and listed and path not in there and (OVERLAY / path).exists():
            raise CommandError(
                f"{path} was deleted in {made.root}, and is still in overlay/",
                reason="deleted-overlay",
                hint=f"to drop it, remove overlay/{path} and its line in patches/{patchset.PIN_FILE}; else restore it",
            )


def below(path: Path) -> str:
    """*path* as it is called below this project."""
    return path.relative_to(PATCHES.parent).as_posix()


def claimed(path: str, claims: tuple[str, ...]) -> bool:
    """Whether one of the files and folders *claims* covers *path*."""
    return any(path == claim or path.startswith(f"{claim}/") for claim in claims)
