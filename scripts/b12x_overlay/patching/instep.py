# SPDX-License-Identifier: Apache-2.0
"""Which patch and overlay files a checkout was last in step with, so that export takes back nothing that is newer here.

Two sources: the marker in the checkout's HEAD (as applied), and a record of what was exported from the checkout, which
lies in its git folder and counts as long as the marker is the same. A file that is neither was changed here since, by
an editor, a pull or an export from another checkout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.patching import recorded
from b12x_overlay.patching.entry import Entry
from b12x_overlay.patching.gitrepo import Checkout
from b12x_overlay.patching.patchset import MARKER, sha256

_RECORD = "b12x-overlay-export.json"


@dataclass(frozen=True, slots=True)
class InStep:
    """Hashes by path below this project (``patches/NAME.patch``, ``overlay/...``), each from apply or export."""

    hashes: Mapping[str, frozenset[str]]
    marked: bool
    """False where the checkout has no marker (made with ``git am``): then nothing is known."""

    def knows(self, path: str, found: str | None) -> bool:
        """Whether *found* (a sha256; None: no such file) is what the checkout was in step with."""
        known = self.hashes.get(path)
        return found in known if known else found is None


def load(made: Checkout) -> InStep:
    """What is known about *made*; a damaged marker or record counts as none."""
    marker = made.read(MARKER)
    old = recorded.from_marker(marker)
    if old is None or not isinstance(marker, Entry):
        return InStep({}, False)
    known = _record(_place(made), marker.sha256)
    for name, value in old.patches.items():
        known.setdefault(f"patches/{name}.patch", set()).add(value)
    for path, value in old.overlay.items():
        known.setdefault(f"overlay/{path}", set()).add(value)
    return InStep({path: frozenset(values) for path, values in known.items()}, True)


def save(made: Checkout, contents: Mapping[str, bytes]) -> None:
    """Record that *made* and the files *contents* (path below this project to bytes) hold the same."""
    marker = made.read(MARKER)
    if not isinstance(marker, Entry):
        return
    known = _record(_place(made), marker.sha256)
    for path, data in contents.items():
        known.setdefault(path, set()).add(sha256(data))
    files = {path: sorted(known[path]) for path in sorted(known)}
    _place(made).write_text(json.dumps({"marker": marker.sha256, "files": files}, indent=1) + "\n")


def _place(made: Checkout) -> Path:
    return Path(made.repo.git_dir) / _RECORD


def _record(path: Path, marker: str) -> dict[str, set[str]]:
    try:
        document = json.loads(path.read_text())
        if document["marker"] != marker:
            return {}
        return {str(name): {*map(str, values)} for name, values in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
