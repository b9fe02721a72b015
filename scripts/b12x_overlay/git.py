# SPDX-License-Identifier: Apache-2.0
"""The one way to git: the binary, run with an environment in which only the repository decides the result.

Bytes in, bytes out. Variables that would point git at another repository, index or author are dropped; settings of
the user or the repository that would change a diff, a merge or a commit (hooks, signing, rerere, line endings,
diff layout …) are overridden. Identity, credentials, proxies and ``safe.directory`` stay the user's.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode

OLDEST = (2, 39)
"""``git patch-id --verbatim`` came with this version, ``merge-tree --write-tree`` with the one before."""

_KEPT = re.compile(
    # SSH and askpass programs, prompts, proxies and TLS, tracing, committer identity, where configuration lies
    r"GIT_(SSH|SSH_COMMAND|SSH_VARIANT|ASKPASS|TERMINAL_PROMPT|PROXY_COMMAND|HTTP_.*|SSL_.*|CURL_.*|TRACE.*|"
    r"COMMITTER_(NAME|EMAIL|DATE)|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM)|EXEC_PATH|ALLOW_PROTOCOL|CEILING_DIRECTORIES)"
)

_SETTINGS = {
    "advice.detachedHead": "false",
    "branch.autoSetupMerge": "false",
    "color.ui": "false",
    "commit.cleanup": "scissors",  # keeps message lines that start with #
    "commit.gpgSign": "false",  # would ask for a passphrase in the middle of a run
    "commit.template": "",
    "commit.verbose": "false",
    "core.abbrev": "12",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.commentChar": "#",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,  # a hook may rewrite messages or files, or refuse
    "core.quotePath": "false",
    "core.safecrlf": "false",
    "core.whitespace": "",
    "diff.algorithm": "myers",
    "diff.context": "3",
    "diff.ignoreSubmodules": "none",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": os.devnull,
    "diff.relative": "false",
    "diff.renames": "true",
    "diff.submodule": "short",
    "diff.suppressBlankEmpty": "false",
    "fetch.prune": "false",
    "fetch.recurseSubmodules": "false",
    "gc.auto": "0",
    "i18n.logOutputEncoding": "UTF-8",
    "log.follow": "false",
    "log.mailmap": "false",
    "log.showSignature": "false",
    "maintenance.auto": "false",
    "merge.conflictStyle": "merge",  # conflict markers are read back
    "merge.directoryRenames": "conflict",
    "merge.renames": "true",
    "merge.renormalize": "false",
    "push.followTags": "false",
    "push.gpgSign": "false",
    "push.recurseSubmodules": "no",
    "rerere.autoUpdate": "false",
    "rerere.enabled": "false",  # a recorded resolution would hide a conflict
    "submodule.recurse": "false",
}


class GitError(CommandError):
    """git failed where it should not have; the message holds the command and what git said."""


@dataclass(frozen=True)
class Result:
    """What a git command returned."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text, without the last newline; bytes that are not UTF-8 survive a round trip."""
        return self.out.decode("utf-8", "surrogateescape").rstrip("\n")


@functools.cache
def environment() -> dict[str, str]:
    """The variables git runs with."""
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("GIT_") or _KEPT.fullmatch(key)
    }
    env |= {
        "LC_ALL": "C.UTF-8", "LANGUAGE": "C", "GIT_EDITOR": "true", "GIT_SEQUENCE_EDITOR": "true",
        "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_PAGER": "cat",
        "GIT_CONFIG_COUNT": str(len(_SETTINGS)),
    }  # fmt: skip
    env.setdefault("GIT_TERMINAL_PROMPT", "0")
    for index, (key, value) in enumerate(_SETTINGS.items()):
        env[f"GIT_CONFIG_KEY_{index}"] = key
        env[f"GIT_CONFIG_VALUE_{index}"] = value
    return env


class Git:
    """git in one folder."""

    def __init__(self, folder: Path, extra: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._extra = dict(extra or {})

    def at(self, folder: Path) -> Git:
        """git in another folder (a work tree of the same repository)."""
        return Git(folder, self._extra)

    def with_variables(self, **variables: str) -> Git:
        """The same folder with further environment variables."""
        return Git(self.folder, {**self._extra, **variables})

    def run(self, *args: str, stdin: bytes | None = None, ok: Iterable[int] = (0,)) -> Result:
        """Run ``git args``.

        Raises:
            GitError: git is missing, or its exit status is not in *ok*.
        """
        try:
            done = subprocess.run(
                ["git", *args], cwd=self.folder, env={**environment(), **self._extra}, capture_output=True, check=False,
                input=b"" if stdin is None else stdin,
            )  # fmt: skip
        except FileNotFoundError as error:
            if error.filename != "git":
                raise
            raise GitError(
                "git is not installed or not on PATH",
                code=ExitCode.FAILED,
                reason="no-git",
                hint="install git",
            ) from error
        result = Result(
            done.returncode, done.stdout, done.stderr.decode("utf-8", "replace").strip()
        )
        if done.returncode not in ok:
            said = result.err or result.text[-500:] or "no message"
            raise GitError(f"git {' '.join(args[:6])} ended with {done.returncode} in {self.folder}: {said}",
                           code=ExitCode.FAILED, reason="git")  # fmt: skip
        return result

    def text(self, *args: str, stdin: bytes | None = None) -> str:
        """Standard output of a command that must succeed."""
        return self.run(*args, stdin=stdin).text

    def lines(self, *args: str, stdin: bytes | None = None) -> list[str]:
        """Standard output's lines (split at newlines only)."""
        text = self.text(*args, stdin=stdin)
        return text.split("\n") if text else []

    def fields(self, *args: str, stdin: bytes | None = None) -> list[str]:
        """Standard output's NUL-terminated fields."""
        return self.text(*args, stdin=stdin).split("\0")[:-1]

    def commit(self, name: str) -> str | None:
        """The commit that *name* stands for, or None."""
        found = self.run(
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            f"{name}^{{commit}}",
            ok=(0, 1, 128),
        )
        return found.text if found.code == 0 else None

    def blobs(self, ids: Iterable[str]) -> Iterator[bytes | None]:
        """The objects *ids* (or ``commit:path`` names), None for those that are missing."""
        names = "".join(f"{one}\n" for one in ids).encode("utf-8", "surrogateescape")
        data = self.run("cat-file", "--batch", stdin=names).out if names else b""
        at = 0
        while at < len(data):
            header = data[at : data.index(b"\n", at)]
            at += len(header) + 1
            parts = header.rsplit(b" ", 2)
            if (
                len(parts) == 3
                and parts[2].isdigit()
                and parts[1] in (b"blob", b"tree", b"commit", b"tag")
            ):
                size = int(parts[2])
                yield data[at : at + size]
                at += size + 1
            else:
                yield None


def version() -> tuple[int, ...]:
    """git's version as numbers."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", Git(Path(os.sep)).text("version"))
    return tuple(int(part) for part in found.groups() if part) if found else (0,)


def require_version() -> None:
    """Refuse a git that is too old.

    Raises:
        GitError: older than `OLDEST`.
    """
    found = version()
    if found < OLDEST:
        wanted, have = (".".join(map(str, numbers)) for numbers in (OLDEST, found))
        raise GitError(
            f"git {have} is too old; wanted {wanted} or newer",
            reason="git-version",
            hint="upgrade git",
        )
