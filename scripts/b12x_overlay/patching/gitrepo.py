# SPDX-License-Identifier: Apache-2.0
"""Git through GitPython, for checkouts only: reading blobs as bytes, one commit per patch (``apply --commit``)."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.patching import again, chain, checkout, cli, engine, environment, report
from b12x_overlay.patching.entry import Entry, Found
from b12x_overlay.patching.patchset import MARKER, Patch, PatchSet
from b12x_overlay.patching.state import State, judge
from b12x_overlay.patching.survey import Survey, survey
from b12x_overlay.patching.target import FolderTarget

if TYPE_CHECKING:
    import git

# Settings of the user or the repository that would change bytes.
_NEUTRAL = (
    "core.autocrlf=false", "core.safecrlf=false", "core.quotePath=true", "core.attributesFile=/dev/null",
    "i18n.commitEncoding=UTF-8", "i18n.logOutputEncoding=UTF-8", "mailinfo.scissors=false",
    "diff.noprefix=false", "diff.mnemonicPrefix=false", "diff.algorithm=myers", "diff.context=3",
    "diff.interHunkContext=0", "diff.suppressBlankEmpty=false", "diff.indentHeuristic=true", "diff.orderFile=/dev/null",
    "diff.renames=false", "diff.external=", "diff.submodule=short", "diff.wsErrorHighlight=none", "color.ui=false",
    "format.encodeEmailHeaders=true", "format.mboxrd=false", "format.signature=", "format.signOff=false",
    "format.useAutoBase=false",
)  # fmt: skip
TRAILER = re.compile(r"^Patch: *([a-z0-9][a-z0-9-]*) *$", re.MULTILINE)
"""The line of a commit message that names its patch."""
_KEPT = ("GIT_COMMITTER_", "GIT_CONFIG", "GIT_EXEC_PATH", "GIT_TRACE")


@dataclass(frozen=True)
class Checkout:
    """A git checkout whose top is ``root``."""

    root: Path
    repo: git.Repo

    def run(
        self, *args: str, data: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> bytes:
        """git's standard output, as bytes.

        Raises:
            CommandError: git fails; its own message is passed on.
        """
        from git.exc import GitCommandError

        options = [word for setting in _NEUTRAL for word in ("-c", setting)]
        with tempfile.TemporaryFile() as stream:
            stream.write(data or b"")
            stream.seek(0)
            try:
                out = self.repo.git.execute(
                    ["git", *options, *args], istream=stream, env=dict(env or {}),
                    stdout_as_string=False, strip_newline_in_stdout=False,
                )  # fmt: skip
            except GitCommandError as error:
                text = str(error.stderr).strip().removeprefix("stderr: ").strip("'\n ")
                raise CommandError(f"git {args[0]} in {self.root}: {text}", reason="git") from error
        assert isinstance(out, bytes)
        return out

    def text(self, *args: str, **kwargs: Any) -> str:
        """git's standard output as a line of text."""
        return self.run(*args, **kwargs).decode(errors="surrogateescape").strip()

    def read(self, path: str, commit: str = "HEAD") -> Found:
        """The blob at *path* in *commit*."""
        from gitdb.exc import BadName

        try:
            blob = self.repo.commit(commit).tree / path
        except (KeyError, BadName):
            return None
        return (
            Entry(blob.data_stream.read(), bool(blob.mode & 0o100)) if blob.type == "blob" else None
        )


@dataclass(frozen=True, slots=True)
class CommitReader:
    """The files of a commit."""

    checkout: Checkout
    commit: str

    def read(self, path: str) -> Found:
        """The blob at *path*."""
        return self.checkout.read(path, self.commit)


def open_checkout(root: Path) -> Checkout:
    """The checkout whose top folder is *root*. Runs in the environment ``apply``.

    Raises:
        CommandError: not the top of a checkout, no commit yet, no git, git in the middle of something.
    """
    if checkout.git_dir(root) is None:
        raise CommandError(
            f"{root} is not the top folder of a git checkout",
            reason="no-checkout",
            hint="give the folder that holds .git, or make one: see 'Writing a patch, and when not to' in README.md",
        )
    checkout.refuse_unfinished(root)
    if shutil.which("git") is None:
        raise CommandError(
            "git is not installed",
            code=ExitCode.FAILED,
            reason="no-git",
            hint="apt-get install git",
        )
    environment.enter()
    for name in list(
        os.environ
    ):  # another repository's variables (a hook, a CI step) must not redirect git
        if name.startswith("GIT_") and not name.startswith(_KEPT):
            del os.environ[name]
    os.environ["GIT_PYTHON_REFRESH"] = "quiet"
    import git

    made = Checkout(root, git.Repo(root))
    if not made.repo.head.is_valid():
        raise CommandError(
            f"{root} has no commit yet",
            reason="no-checkout",
            hint=f"commit the files as they are first: git -C {shlex.quote(str(root))} add -A, then commit",
        )
    return made


def command(
    args: argparse.Namespace, console: Console, patch_set: PatchSet, target: FolderTarget
) -> int:
    """apply --commit: one commit per patch on top of HEAD, and the same files in the working tree."""
    made = open_checkout(target.root)
    if made.run("diff", "--cached", "--name-only"):
        raise CommandError(
            f"{target.root} has staged changes; nothing was changed",
            reason="staged-changes",
            hint=f"commit or unstage them: git -C {shlex.quote(str(target.root))} status",
        )
    head = made.text("rev-parse", "HEAD")
    todo = _uncommitted(made, patch_set)
    if not todo:
        _refuse_without_series(made, patch_set)
    preview = engine.apply(target, patch_set, dry_run=True)
    if preview.code is ExitCode.REFUSED or (args.dry_run and todo):
        outcome = preview
        if preview.code is not ExitCode.REFUSED:
            outcome.outcome, outcome.code = f"would make {len(todo)} commits", ExitCode.DIFFERENT
    else:
        tip = commits(made, patch_set, todo, head)
        outcome = engine.apply(target, patch_set, say=console.progress)
        if outcome.code is ExitCode.OK and tip != head:
            made.run(
                "reset", "--quiet", "--mixed", tip
            )  # the index held no change, and the files are in place
            outcome.outcome = f"applied in {len(todo)} commits"
    described = cli.describe(target)
    next_step = ""
    if todo and outcome.code is not ExitCode.REFUSED:
        next_step = f"git -C {shlex.quote(str(target.root))} log"
    if args.dry_run and outcome.code is ExitCode.DIFFERENT:
        next_step = again.command("apply", args.target, "--commit")
    report.show(console, outcome, patch_set, described, next_step)
    return int(outcome.code)


def commits(made: Checkout, patch_set: PatchSet, todo: Sequence[Patch], head: str) -> str:
    """Make one commit per patch of *todo* on top of *head* without touching files, index or branch; the last one."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        made.run("read-tree", head, env=env)
        tip = head
        seen = survey(CommitReader(made, head), patch_set, None)
        for patch in todo:
            for path, entry in _content(seen, patch_set, patch).items():
                blob = made.text("hash-object", "-w", "--no-filters", "--stdin", data=entry.data)
                mode = "100755" if entry.executable else "100644"
                made.run("update-index", "--add", "--cacheinfo", f"{mode},{blob},{path}", env=env)
            tree = made.text("write-tree", env=env)
            message, author = _message(made, patch)
            tip = made.text("commit-tree", tree, "-p", tip, data=message, env=author)
    return tip


def _uncommitted(made: Checkout, patch_set: PatchSet) -> list[Patch]:
    """The patches that HEAD lacks: all, none, or the last ones."""
    judged = judge(survey(CommitReader(made, "HEAD"), patch_set, None))
    states = [patch.state for patch in judged.patches]
    done = states.count(State.APPLIED)
    if states != [State.APPLIED] * done + [State.NOT_APPLIED] * (len(states) - done):
        found = ", ".join(f"{patch.name} {patch.state}" for patch in judged.patches)
        raise CommandError(
            f"HEAD of {made.root} holds neither vLLM {patch_set.pin.version} nor the first patches of the set: {found}",
            reason="wrong-head",
            hint="check out the pinned version, then run the command again",
        )
    return list(patch_set.patches[done:])


def _refuse_without_series(made: Checkout, patch_set: PatchSet) -> None:
    """HEAD holds the set: as commits that export can read, or as one that somebody made of the patched files?"""
    log = made.text("log", "--first-parent", "--format=%B", f"-{4 * len(patch_set.patches)}")
    there = TRAILER.findall(log)
    lost = [patch.name for patch in patch_set.patches if patch.name not in there]
    if lost:
        where = shlex.quote(str(made.root))
        raise CommandError(
            f"HEAD of {made.root} holds the set, but not as one commit per patch ({lost[0]} has none)",
            reason="no-series",
            hint=f"scripts/apply-patches revert --target {where}, commit that, then run this command again",
        )


def _content(seen: Survey, patch_set: PatchSet, patch: Patch) -> dict[str, Entry]:
    """The files of *patch*'s commit; the marker goes with the last one."""
    files: dict[str, Entry] = {}
    for touched in patch.files:
        links = patch_set.chains[touched.path]
        entry = seen.entry(touched.path)
        assert entry is not None
        have = chain.position(entry, links)
        want = next(i for i, step in enumerate(links) if step.patch == patch.name) + 1
        assert have is not None
        files[touched.path] = chain.at(entry, links, have, want)
    files |= {file.path: Entry(file.data, file.executable) for file in patch.overlay}
    if patch is patch_set.patches[-1]:
        files[MARKER] = Entry(seen.marker)
    return files


def _message(made: Checkout, patch: Patch) -> tuple[bytes, dict[str, str]]:
    """Commit message and author of a patch file, as git itself reads them."""
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "message"
        head = made.run(
            "mailinfo", "-k", "--encoding=UTF-8", str(body), os.devnull, data=patch.data
        )
        text = body.read_bytes()
    fields = dict(line.split(b": ", 1) for line in head.splitlines() if b": " in line)
    author = {
        "GIT_AUTHOR_NAME": fields.get(b"Author", b"").decode(),
        "GIT_AUTHOR_EMAIL": fields.get(b"Email", b"").decode(),
        "GIT_AUTHOR_DATE": fields.get(b"Date", b"").decode(),
    }
    if not all(author.values()) or b"Subject" not in fields:
        raise CommandError(
            f"patches/{patch.name}.patch has no From, Date and Subject lines",
            code=ExitCode.FAILED,
            reason="bad-patch-set",
        )
    return fields[b"Subject"] + b"\n\n" + text, author
