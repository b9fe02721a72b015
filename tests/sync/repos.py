# SPDX-License-Identifier: Apache-2.0
"""Real git repositories for the sync's tests, built commit by commit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from b12x_overlay.git import environment
from b12x_overlay.paths import REPO
from b12x_overlay.sync.cli import main
from sync.fragments import encode, fragment

NAME, MAIL = "Ada Lovelace", "ada@users.noreply.github.com"
ENV = {
    **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": NAME,
    "GIT_AUTHOR_EMAIL": MAIL,
    "GIT_COMMITTER_NAME": "Sync Bot",
    "GIT_COMMITTER_EMAIL": "bot@example.org",
    "GIT_AUTHOR_DATE": "2026-10-01T12:00:00Z",
    "GIT_COMMITTER_DATE": "2026-10-01T12:00:00Z",
    "GIT_EDITOR": "true",
    "SOURCE_DATE_EPOCH": "1790942400",  # 2026-10-02
    "PYTHONDONTWRITEBYTECODE": "1",
}
CODE = f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r}); from b12x_overlay.sync.cli import main; sys.exit(main())"
COMMAND = [sys.executable, "-c", CODE]
"""scripts/sync-beta under the tests' own interpreter, which has its libraries."""

TEXT = "".join(f"line {number}\n" for number in range(1, 41))


@dataclass
class Told:
    """What a run of the command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    def decisions(self) -> dict[str, str]:
        """Subject to decision, with the kind of evidence where there is one."""
        return {
            step["subject"]: f"{step['decision']}: {step['evidence']['kind']}"
            if step["evidence"]
            else step["decision"]
            for step in self.json["plan"]
        }


@dataclass
class Repo:
    """A repository with the branches main (canonical) and beta."""

    path: Path
    env: dict[str, str] = field(default_factory=lambda: dict(ENV))

    @classmethod
    def create(cls, path: Path, files: dict[str, str | bytes | None] | None = None) -> Repo:
        path.mkdir(parents=True)
        repo = cls(path)
        repo.git("init", "-q", "-b", "main")
        repo.commit("start", {"code.py": TEXT, "other.py": TEXT, **(files or {})})
        repo.git("branch", "beta")
        return repo

    def git(self, *args: str, stdin: bytes | None = None, ok: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            ["git", *args],
            cwd=self.path,
            env=self.env,
            capture_output=True,
            input=stdin,
            check=False,
        )
        assert done.returncode in ok, (args, done.stdout, done.stderr)
        return done.stdout.decode("utf-8", "surrogateescape").rstrip("\n")

    def on(self, branch: str) -> Repo:
        self.git("switch", "-q", branch)
        return self

    def write(self, files: dict[str, str | bytes | None]) -> None:
        for name, content in files.items():
            path = self.path / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def commit(
        self,
        message: str,
        files: dict[str, str | bytes | None] | None = None,
        *,
        author: str | None = None,
    ) -> str:
        """Commit on the branch that is checked out; a content of None deletes the file."""
        self.write(files or {})
        self.git("add", "-A")
        flags = ["--author", author] if author else []
        self.git(
            "commit",
            "-q",
            "--allow-empty",
            "--cleanup=verbatim",
            *flags,
            "-F",
            "-",
            stdin=message.encode(),
        )
        return self.tip("HEAD")

    def edit(self, message: str, line: int, text: str, name: str = "code.py", **more: Any) -> str:
        """Commit another text for one line (from 1) of a file; None takes the line out."""
        lines = (self.path / name).read_text().split("\n")
        lines[line - 1] = text
        return self.commit(message, {name: "\n".join(lines), **more.pop("files", {})}, **more)

    def pick(self, commit: str, *flags: str) -> str:
        self.git("cherry-pick", "-x", *flags, commit)
        return self.tip("HEAD")

    def tip(self, name: str) -> str:
        return self.git("rev-parse", name)

    def file(self, commit: str, path: str) -> str:
        return self.git("show", f"{commit}:{path}") + "\n"

    def blob(self, commit: str, path: str) -> str:
        return self.tip(f"{commit}:{path}")

    def subjects(self, span: str) -> list[str]:
        return self.git("log", "--reverse", "--topo-order", "--format=%s", span).splitlines()

    def message(self, commit: str) -> str:
        return self.git("log", "-1", "--format=%B", commit)

    def snapshot(self) -> tuple[Any, ...]:
        """Everything that a failed run must leave: refs, worktrees, status, index bytes, config."""
        return (
            self.git("for-each-ref", "--format=%(refname) %(objectname)"),
            self.git("worktree", "list"),
            self.git("status", "--porcelain", "--ignored"),
            self.git("symbolic-ref", "-q", "HEAD", ok=(0, 1)),
            (self.path / ".git" / "config").read_bytes(),
            sorted(one.name for one in (self.path / ".git").iterdir() if one.name != "sync-beta"),
        )

    def sync(
        self,
        *args: str,
        canonical: str = "main",
        beta: str = "beta",
        env: dict[str, str] | None = None,
    ) -> Told:
        """Run the command in this process, with this repository's environment."""
        out, err = io.StringIO(), io.StringIO()
        kept = dict(os.environ)
        environment.cache_clear()
        try:
            os.environ.clear()
            os.environ.update(self._variables(env))
            with redirect_stdout(out), redirect_stderr(err):
                try:
                    code = main(self._arguments(args, canonical, beta))
                except SystemExit as stopped:
                    code = int(stopped.code or 0)
        finally:
            os.environ.clear()
            os.environ.update(kept)
            environment.cache_clear()
        return Told(code, out.getvalue(), err.getvalue())

    def start_sync(self, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the command as a process of its own."""
        return subprocess.Popen(
            [*COMMAND, *self._arguments(args, "main", "beta")], env=self._variables(env), cwd=self.path.parent,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _variables(self, env: dict[str, str] | None) -> dict[str, str]:
        kept = {key: value for key, value in self.env.items() if not key.startswith("GIT_AUTHOR")}
        return kept | {"TMPDIR": tempfile.gettempdir()} | (env or {})

    def _arguments(self, args: tuple[str, ...], canonical: str, beta: str) -> list[str]:
        lines = (
            []
            if "--continue" in args or "--abort" in args
            else ["--canonical", canonical, "--beta", beta]
        )
        return ["--repo", str(self.path), *lines, "--json", *args]


def one_fragment(name: str, **fields: Any) -> dict[str, str | bytes | None]:
    """The file of a fragment, for `Repo.commit`."""
    return {f"changes/{name}.json": encode(fragment(name, **fields))}
