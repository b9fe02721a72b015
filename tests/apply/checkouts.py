# SPDX-License-Identifier: Apache-2.0
"""Git checkouts for the tests of apply --commit and export."""

from __future__ import annotations

import subprocess
from pathlib import Path

from apply.factory import Project, contents, place

CONFIG = "[user]\n\tname = Tester\n\temail = t@example.invalid\n[init]\n\tdefaultBranch = main\n"


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files(made: Project) -> dict[str, bytes]:
    return contents(made.root / "patches") | contents(made.root / "overlay")


def amend(checkout: Path, path: str, old: bytes, new: bytes) -> None:
    """Change *path* in the last commit."""
    data = (checkout / path).read_bytes()
    assert old in data
    place(checkout, path, data.replace(old, new))
    git(checkout, "add", path)
    git(checkout, "commit", "--quiet", "--amend", "--no-edit")
