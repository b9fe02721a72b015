# SPDX-License-Identifier: Apache-2.0
"""The verb export: a checkout's commits, one per patch, become patches/*.patch and the hashes of patchset.toml.

A commit belongs to the patch that its message's last ``Patch: NAME`` line names; the series is what lies between
HEAD and the first commit without such a line. Nothing is written unless everything fits, and no patch is ever
deleted. Overlay files edited in the checkout come back too. What was changed here since the checkout was in step
(``instep``) is never overwritten.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import diff, gitrepo, hunks, instep, patchset, pinfile
from b12x_overlay.patching.entry import Entry
from b12x_overlay.patching.gitrepo import Checkout
from b12x_overlay.patching.instep import InStep
from b12x_overlay.patching.overlayback import below, claimed, overlay_back
from b12x_overlay.patching.patchset import MARKER, PatchSetError, TouchedFile
from b12x_overlay.paths import OVERLAY, PATCHES

_ENDS_MESSAGE = re.compile(r"^(---|diff --git )", re.MULTILINE)
_WHAT = {"A": "adds", "D": "deletes", "T": "changes the type of"}
_FORMAT = (
    "format-patch", "-1", "--stdout", "--zero-commit", "--keep-subject", "--no-stat", "--no-signature", "--full-index",
    "--no-attach", "--no-thread", "--no-cover-letter", "--no-numbered", "--no-notes", "--no-to", "--no-cc",
    "--no-add-header", "--no-from", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exported:
    """One commit as a patch."""

    name: str
    data: bytes
    files: tuple[TouchedFile, ...]


def command(args: argparse.Namespace, console: Console) -> int:
    """Export; with --dry-run only say what would change."""
    made = gitrepo.open_checkout(Path(args.target).expanduser().resolve())
    # the marker is written anew by every apply and is not exported
    loose = made.run(
        "status", "--porcelain", "--untracked-files=no", "--", ":(top)", f":(top,exclude){MARKER}"
    ) or made.run("ls-files", "--others", "--exclude-standard", "--", ":(top)vllm/**/*.py")
    if loose:
        raise CommandError(
            f"{made.root} has changes that are not committed, {_first(loose)} first; export takes commits only",
            reason="uncommitted-changes",
            hint=f"git -C {shlex.quote(str(made.root))} status, then commit them (git commit --fixup, git rebase --autosquash)",
        )
    try:
        document = patchset.read_pin_file(PATCHES)
    except PatchSetError as error:
        raise CommandError(str(error), code=ExitCode.FAILED, reason="bad-patch-set") from error
    claims = {
        str(row.get("name")): tuple(row.get("overlay", [])) for row in document.get("patch", [])
    }
    series, end = _series(made)
    _check_names(made, [name for _, name in series], list(claims), end)
    exported = [_export(made, commit, name, claims) for commit, name in series]
    in_step = instep.load(made)
    writes = {PATCHES / f"{one.name}.patch": one.data for one in exported}
    _refuse_newer_patches(made, in_step, writes)
    overlay, same = overlay_back(made, claims, in_step)
    writes |= overlay
    pin = PATCHES / patchset.PIN_FILE
    writes[pin] = pinfile.with_files(pin.read_bytes(), [(one.name, one.files) for one in exported])
    changed = [
        path for path, data in writes.items() if not path.exists() or path.read_bytes() != data
    ]
    _check_result({path: writes[path] for path in changed})
    if not args.dry_run:
        _write({path: writes[path] for path in changed})
        held = {below(path): data for path, data in writes.items() if path != pin} | same
        instep.save(made, held)
    return _report(args, console, exported, changed)


def _first(listed: bytes) -> str:
    return listed.decode(errors="replace").splitlines()[0].strip()


def _series(made: Checkout) -> tuple[list[tuple[str, str]], str]:
    """Commit and patch name, oldest first, and the commit below, at which the series ends."""
    found: list[tuple[str, str]] = []
    end = ""
    for commit in made.repo.iter_commits("HEAD", first_parent=True):
        message = (
            commit.message
            if isinstance(commit.message, str)
            else commit.message.decode(errors="replace")
        )
        names = gitrepo.TRAILER.findall(message)
        if not names:
            what = "a merge" if len(commit.parents) > 1 else "no line 'Patch: NAME' in its message"
            end = f"{commit.hexsha[:12]} ({str(commit.summary)[:60]}; {what})"
            break
        if len(commit.parents) != 1:
            raise CommandError(
                f"{commit.hexsha[:12]} ({names[-1]}) is a merge or has no parent; a patch is one commit on another",
                reason="bad-series",
            )
        found.append((commit.hexsha, names[-1]))
    if not found:
        raise CommandError(
            f"HEAD of {made.root} ({made.text('log', '-1', '--format=%h %s')}) has no line 'Patch: NAME', so there is "
            "nothing to export; no patch was changed",
            reason="empty-series",
            hint="make the series with: scripts/apply-patches apply --commit --target CHECKOUT",
        )
    return found[::-1], end


def _check_names(made: Checkout, commits: list[str], listed: list[str], end: str) -> None:
    for name in commits:
        if commits.count(name) > 1:
            raise CommandError(
                f"{made.root} has {commits.count(name)} commits for {name}; a patch is one commit",
                reason="bad-series",
                hint="squash them: git rebase -i",
            )
        if name not in listed:
            raise CommandError(
                f"{name} has a commit in {made.root}, but no [[patch]] in patches/{patchset.PIN_FILE}",
                reason="unlisted-patch",
                hint=f'add it with name = "{name}", what, why, until, fragments and overlay; export fills in its files',
            )
    for name in listed:
        if name not in commits:
            raise CommandError(
                f"{name} is in patches/{patchset.PIN_FILE}, but has no commit in {made.root}: going back from HEAD, the "
                f"series ends at {end or 'the first commit'}; no patch was changed",
                reason="missing-commit",
                hint="if that commit belongs to the series, give its message the line or take the merge out; to drop "
                f"{name}, remove its [[patch]] and patches/{name}.patch first",
            )


def _export(made: Checkout, commit: str, name: str, claims: dict[str, tuple[str, ...]]) -> Exported:
    paths = []
    message = made.text("log", "-1", "--format=%B", commit)
    if _ENDS_MESSAGE.search(message):
        raise CommandError(
            f"the message of {name} ({commit[:12]}) has a line that begins with '---' or 'diff --git': in a patch file "
            "the message ends there",
            reason="bad-message",
            hint="git rebase -i, reword it: indent such lines",
        )
    raw = made.run("diff-tree", "-r", "-z", "--no-renames", "--raw", f"{commit}^", commit)
    words = raw.decode(errors="surrogateescape").split("\0")
    for change, path in zip(words[:-1:2], words[1::2], strict=True):
        old_mode, new_mode, _, _, status = change.removeprefix(":").split(" ")
        if path == MARKER or any(claimed(path, listed) for listed in claims.values()):
            continue
        if status != "M" or not path.startswith("vllm/"):
            raise CommandError(
                f"{name} ({commit[:12]}) {_WHAT.get(status, 'changes')} {path}: a patch changes files of vllm/ and neither "
                "adds nor removes any",
                reason="bad-patch",
                hint=f"copy a new file to overlay/ and list it under overlay of {name}'s [[patch]]; leave the rest out",
            )
        if old_mode != new_mode:
            raise CommandError(
                f"{name} ({commit[:12]}) changes the mode of {path} from {old_mode} to {new_mode}: a patch changes text only",
                reason="bad-patch",
                hint="give the file its mode back, commit --amend",
            )
        paths.append(path)
    if not paths:
        raise CommandError(
            f"{name} ({commit[:12]}) changes no upstream file; no patch was changed",
            reason="empty-patch",
        )
    data = made.run(*_FORMAT, commit, "--", *(f":(top,literal){path}" for path in paths))
    return Exported(name, data, tuple(_checked(made, commit, name, data)))


def _checked(made: Checkout, commit: str, name: str, data: bytes) -> Iterator[TouchedFile]:
    """The touched files, after this engine has turned the old bytes into the new ones with the exported text."""
    try:
        for one in diff.parse(data):
            old, new = made.read(one.path, f"{commit}^"), made.read(one.path, commit)
            assert isinstance(old, Entry)
            assert isinstance(new, Entry)
            if hunks.apply(one, old.data) != new.data or hunks.reverse(one, new.data) != old.data:
                raise hunks.HunkError(one.path, 1, b"", b"", one.hunks[0])
            yield TouchedFile(one.path, old.sha256, new.sha256)
    except (diff.PatchFormatError, hunks.HunkError) as error:
        raise CommandError(
            f"{name} ({commit[:12]}) cannot be exported: {error}", reason="bad-patch"
        ) from error


def _refuse_newer_patches(made: Checkout, in_step: InStep, writes: dict[Path, bytes]) -> None:
    """Refuse to overwrite patches that were changed here since the checkout got its series."""
    if not in_step.marked:
        return
    newer = [
        below(path)
        for path, data in writes.items()
        if path.exists()
        and (mine := path.read_bytes()) != data
        and not in_step.knows(below(path), patchset.sha256(mine))
    ]
    if newer:
        raise CommandError(
            f"{', '.join(newer)} changed here since {made.root} got its series (by an edit, a pull or an export from "
            "another checkout); exporting would take that back",
            reason="newer-patch",
            hint="apply the set to a fresh checkout and move the edits there; if the checkout's version is the right "
            f"one after all: rm {shlex.join(newer)}, then export again",
        )


def _write(writes: dict[Path, bytes]) -> None:
    """Replace the files one by one, the pin file last; each is whole at any time."""
    for path, data in sorted(writes.items(), key=lambda item: item[0].name == patchset.PIN_FILE):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _check_result(writes: dict[Path, bytes]) -> None:
    """Load the set as it will be, from a copy, before anything is written."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for source in (PATCHES, OVERLAY):
            shutil.copytree(source, root / source.name, symlinks=True)
        for path, data in writes.items():
            place = root / below(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        try:
            loaded = patchset.load(root / PATCHES.name, root / OVERLAY.name)
        except PatchSetError as error:
            raise CommandError(
                f"the set would not be in order: {str(error).replace(folder, str(PATCHES.parent))}; nothing was written",
                reason="bad-patch-set",
                hint=f"git -C {shlex.quote(str(PATCHES.parent))} status -- patches overlay says what was edited or removed",
            ) from error
    if loaded.unclaimed:  # it would not be applied, and the set would fail where it is imported
        raise CommandError(
            f"overlay/{loaded.unclaimed[0]} belongs to no patch and would not be applied; nothing was written",
            reason="unlisted-overlay",
            hint=f"list it under overlay of its [[patch]] in patches/{patchset.PIN_FILE}, or remove it",
        )


def _report(
    args: argparse.Namespace, console: Console, exported: list[Exported], changed: list[Path]
) -> int:
    names = [below(path) for path in changed]
    code = ExitCode.DIFFERENT if args.dry_run and changed else ExitCode.OK
    outcome = "unchanged" if not changed else "would export" if args.dry_run else "exported"
    document: dict[str, Any] = {
        "command": "export", "outcome": outcome, "exit": int(code), "changed": names,
        "patches": [{"name": one.name, "sha256": patchset.sha256(one.data)} for one in exported],
    }  # fmt: skip
    console.json(document)
    rows = [
        (
            one.name,
            str(len(one.files)),
            "changed" if f"patches/{one.name}.patch" in names else "as it was",
        )
        for one in exported
    ]
    console.table(rows, ("patch", "files", "state"))
    for name in names:
        console.say(f"  {'would write' if args.dry_run else 'wrote'} {name}")
    console.say(outcome)
    console.say(
        "next: scripts/apply-patches list, then scripts/test -m apply"
        if changed
        else "next: nothing to do"
    )
    return int(code)
