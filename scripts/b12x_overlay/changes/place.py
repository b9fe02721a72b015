# SPDX-License-Identifier: Apache-2.0
"""Which folder, component, patch set and receipts a run is about: flags first, then .ci/lines.toml, then defaults."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.changes.checking import Report, check_entries
from b12x_overlay.changes.model import Entry
from b12x_overlay.changes.reading import read_folder
from b12x_overlay.changes.receipts import Receipt, read_receipt, read_receipts
from b12x_overlay.changes.rules import patchset_fragments
from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git
from b12x_overlay.lines import LINES_FILE, Lines, check_lines, read_lines
from b12x_overlay.paths import REPO


@dataclass(frozen=True)
class Place:
    """The fragments of one repository and what belongs to them."""

    folder: Path
    component: str
    lines: Lines
    receipts: Path
    receipt: Receipt | None
    patchset: Path | None

    def check(self) -> Report:
        """Check the folder with all that is known of it.

        Raises:
            CommandError: the folder or the patch set is missing or unreadable.
        """
        return check_entries(
            self.entries(),
            self.component,
            patches=self._patches(),
            receipt=self.receipt,
            old_bytes=self.old_bytes(),
        )

    def entries(self) -> list[Entry]:
        return read_folder(self.folder)

    def old_bytes(self) -> Callable[[str], bytes | None]:
        """Looks a published blob up in the repository around the folder, if there is one."""
        folder = self.folder if self.folder.is_dir() else Path.cwd()

        def look_up(blob: str) -> bytes | None:
            try:
                found = Git(folder).run("cat-file", "blob", blob, ok=range(256))
            except CommandError:  # no git here: the comparison of ids stands without it
                return None
            return found.out if found.code == 0 else None

        return look_up

    def _patches(self) -> tuple[str, Mapping[str, Sequence[str]]] | None:
        if self.patchset is None:
            return None
        try:
            return str(self.patchset), patchset_fragments(self.patchset)
        except OSError as error:
            raise CommandError(
                f"{self.patchset} cannot be read: {error.strerror}", code=ExitCode.USAGE, reason="patchset",
                hint="name another with --patchset (--patchset none: without)",
            ) from error  # fmt: skip
        except ValueError as error:
            raise CommandError(
                f"{self.patchset}: {error}",
                code=ExitCode.DIFFERENT,
                reason="patchset",
                hint=f"correct {self.patchset}",
            ) from error


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which fragments a verb is about."""
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="the fragments; default: changes/ of this repository",
    )
    parser.add_argument(
        "--component", help="what the ids start with; default: as in .ci/lines.toml, else vllm"
    )
    parser.add_argument(
        "--receipt", type=Path, metavar="FILE",
        help="the last release's receipt or the publisher's release-changelog.json; default: the newest in .ci/releases",
    )  # fmt: skip
    parser.add_argument(
        "--patchset", metavar="FILE",
        help="the patch set that names fragments, or 'none'; default: patches/patchset.toml beside the folder",
    )  # fmt: skip


def find_place(args: argparse.Namespace) -> Place:
    """The place that *args* name.

    Raises:
        CommandError: a named file is missing or wrong.
    """
    folder: Path = args.folder or REPO / "changes"
    root = _root(folder)
    lines_file = root / LINES_FILE
    lines = read_lines(lines_file) if lines_file.is_file() else Lines()
    if args.component is not None:
        lines = dataclasses.replace(lines, component=args.component)
        check_lines(lines, "the command line")
    receipts = root / lines.receipts
    if args.receipt is not None:
        receipt: Receipt | None = read_receipt(args.receipt)
    else:
        receipt = next(reversed(read_receipts(receipts)), None)
    return Place(
        folder,
        lines.component,
        lines,
        receipts,
        receipt,
        _patchset(args, root, lines),
    )


def _root(folder: Path) -> Path:
    """The repository that *folder* belongs to: the nearest parent with .git or the lines file."""
    parents = [*folder.absolute().parents]
    return next(
        (one for one in parents if (one / ".git").exists() or (one / LINES_FILE).is_file()),
        parents[0],
    )


def _patchset(args: argparse.Namespace, root: Path, lines: Lines) -> Path | None:
    if args.patchset == "none":
        return None
    if args.patchset:
        return Path(args.patchset)
    default = root / lines.patchset
    return default if default.is_file() else None
