# SPDX-License-Identifier: Apache-2.0
"""Where a run does its work: a temporary work tree of the repository, or for a dry run of a scratch repository."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git


@dataclass(frozen=True)
class Places:
    """git for each purpose of a run."""

    repo: Git
    """The repository itself: refs and remotes."""
    objects: Git
    """The repository, new objects going where this run may put them."""
    home: Git
    """Where the temporary work tree is made."""


def open_repository(path: Path) -> Git:
    """git at the top of the repository *path*.

    Raises:
        CommandError: no repository there, or one without its history.
    """
    if not path.is_dir():
        raise CommandError(f"--repo {path} is no folder", code=ExitCode.USAGE, reason="repo")
    git = Git(path)
    found = git.run("rev-parse", "--path-format=absolute", "--git-common-dir", ok=(0, 128))
    if found.code != 0:
        raise CommandError(
            f"--repo {path} is no git repository: {found.err}", code=ExitCode.USAGE, reason="repo"
        )
    if git.text("rev-parse", "--is-shallow-repository") == "true":
        raise CommandError(
            f"{path} is a shallow clone: what the lines share cannot be told; nothing was changed", reason="shallow",
            hint=f"git -C {path} fetch --unshallow (in a workflow: actions/checkout with fetch-depth: 0)",
        )  # fmt: skip
    top = git.run("rev-parse", "--show-toplevel", ok=(0, 128))
    return Git(Path(top.text)) if top.code == 0 and top.text else Git(Path(found.text))


def require_identity(git: Git) -> dict[str, str]:
    """The committer's name and address, as environment variables.

    Raises:
        CommandError: git knows none.
    """
    found = git.run("var", "GIT_COMMITTER_IDENT", ok=range(256))
    name, _, rest = found.text.partition(" <")
    mail = rest.partition(">")[0]
    if found.code != 0 or not name or not mail:
        raise CommandError(
            "git does not know who commits; nothing was changed", reason="identity",
            hint="git config user.name NAME && git config user.email ADDRESS",
        )  # fmt: skip
    return {"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": mail}


@contextlib.contextmanager
def places(repo: Git, *, dry_run: bool) -> Iterator[Places]:
    """The repository for a real run; for a dry run a scratch one that borrows its objects and is thrown away."""
    if not dry_run:
        yield Places(repo, repo, repo)
        return
    scratch = Path(tempfile.mkdtemp(prefix="sync-beta-dry-run-"))
    try:
        own = Path(repo.text("rev-parse", "--path-format=absolute", "--git-path", "objects"))
        kind = repo.text("rev-parse", "--show-object-format")
        bare = scratch / "repo.git"
        repo.run("init", "--quiet", "--bare", f"--object-format={kind}", str(bare))
        (bare / "objects" / "info" / "alternates").write_text(f"{own}\n", encoding="utf-8")
        objects = repo.with_variables(
            GIT_OBJECT_DIRECTORY=str(bare / "objects"), GIT_ALTERNATE_OBJECT_DIRECTORIES=str(own)
        )
        yield Places(repo, objects, Git(bare, require_identity(repo)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def add_worktree(home: Git, path: Path, branch: str, start: str) -> Git:
    """Make the temporary work tree, on a branch of its own."""
    home.run("worktree", "add", "--quiet", "--no-track", "-b", branch, str(path), start)
    return home.at(path)


def new_worktree_path() -> Path:
    """A fresh folder name for the temporary work tree; only its parent exists."""
    return Path(tempfile.mkdtemp(prefix="sync-beta-")) / "tree"
