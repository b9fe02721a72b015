# SPDX-License-Identifier: Apache-2.0
"""Finds the two tips, local and at the remote, fetches them without touching a ref, and checks them again later."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git, GitError


@dataclass(frozen=True)
class Line:
    """One line: where its tip is."""

    name: str
    """As the user gave it."""
    branch: str
    """The branch without refs/heads/, or '' for a plain commit or tag."""
    local: str
    """Tip of the local branch, or ''."""
    remote: str
    """Tip at the remote, or ''."""
    tip: str
    """The commit this run works with."""


@dataclass(frozen=True)
class Tips:
    """Both lines and the work branch as this run found them."""

    canonical: Line
    beta: Line
    remote: str
    """The remote's name, or '' for a run without one."""
    work_branch: str
    work: str
    """The work branch's tip at the remote, or ''."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tips:
        return cls(
            **{**value, "canonical": Line(**value["canonical"]), "beta": Line(**value["beta"])}
        )


def find_tips(
    git: Git, objects: Git, canonical: str, beta: str, remote: str, work_branch: str, push: bool
) -> Tips:
    """Look both lines up and fetch what is missing.

    Args:
        git: the repository.
        objects: the same, perhaps with another place for new objects (a dry run writes none to the repository).
        remote: the remote's name, or '' to stay local.
        push: for a pull request: both lines are the remote's.

    Raises:
        CommandError: a name is no branch, the lines diverged from their remotes, the remote cannot be read.
    """
    if git.run(
        "check-ref-format", f"refs/heads/{work_branch}", ok=(0, 1)
    ).code or work_branch.startswith("-"):
        raise CommandError(
            f"--work-branch {work_branch!r} is no branch name",
            code=ExitCode.USAGE,
            reason="work-branch",
        )
    names = {
        key: _branch(git, name, remote) for key, name in (("canonical", canonical), ("beta", beta))
    }
    wanted = [branch for branch in (*names.values(), work_branch) if branch]
    there = read_remote(git, remote, wanted) if remote else {}
    missing = [branch for branch, tip in there.items() if objects.commit(tip) is None]
    if missing:
        _fetch(objects, remote, missing, there)
    lines = {}
    for key, name in (("canonical", canonical), ("beta", beta)):
        branch = names[key]
        local = git.commit(f"refs/heads/{branch}") if branch else None
        lines[key] = _line(
            objects, key, name, branch, local or "", there.get(branch, ""), remote, push
        )
    found = Tips(lines["canonical"], lines["beta"], remote, work_branch, there.get(work_branch, ""))
    if found.beta.branch == "":
        raise CommandError(
            f"--beta {beta} is no branch{_at(remote)}; wanted the branch that receives canonical's work",
            code=ExitCode.USAGE, reason="beta", hint=f"see git branch --all in {git.folder}",
        )  # fmt: skip
    if found.canonical.branch and found.canonical.branch == found.beta.branch:
        raise CommandError(
            f"--canonical and --beta are both {beta}; wanted two lines",
            code=ExitCode.USAGE,
            reason="same-line",
        )
    if work_branch in (found.canonical.branch, found.beta.branch):
        raise CommandError(
            f"--work-branch {work_branch} is one of the lines; wanted a branch of its own", code=ExitCode.USAGE,
            reason="work-branch",
        )  # fmt: skip
    return found


def _at(remote: str) -> str:
    return f" here or at {remote}" if remote else ""


def _branch(git: Git, name: str, remote: str) -> str:
    """The branch that *name* means, with or without refs/heads/ or the remote's name; '' if it can be none."""
    short = name.removeprefix("refs/heads/")
    if remote and name.startswith(f"refs/remotes/{remote}/"):
        short = name.removeprefix(f"refs/remotes/{remote}/")
    elif remote and short.startswith(f"{remote}/") and git.commit(f"refs/heads/{short}") is None:
        short = short.removeprefix(f"{remote}/")
    valid = git.run("check-ref-format", f"refs/heads/{short}", ok=(0, 1)).code == 0
    return short if valid and not name.startswith("-") else ""


def _line(
    git: Git, key: str, name: str, branch: str, local: str, there: str, remote: str, push: bool
) -> Line:  # fmt: skip
    if not local and not there:
        commit = git.commit(name) if key == "canonical" and not name.startswith("-") else None
        if commit is None:
            place = shlex.quote(str(git.folder))
            hint = f"see git -C {place} branch --all"
            if key == "beta" and branch:
                hint += f", or make the line: git -C {place} branch {shlex.quote(branch)} COMMIT, the one that beta starts from"
            raise CommandError(
                f"--{key} {name} is no branch{_at(remote)}",
                code=ExitCode.USAGE,
                reason=key,
                hint=hint,
            )
        return Line(name, "", "", "", commit)
    if not there or there == local:
        return Line(name, branch, local, there, local)
    if push or not local:
        return Line(name, branch, local, there, there)
    if _contains(git, local, there):
        return Line(name, branch, local, there, local)
    if key == "canonical" and _contains(git, there, local):
        return Line(name, branch, local, there, there)
    what = "is behind" if _contains(git, there, local) else "has diverged from"
    raise CommandError(
        f"the local branch {branch} ({local[:12]}) {what} {remote}/{branch} ({there[:12]}); nothing was changed",
        reason="behind", hint=f"git fetch {remote} && git branch -f {branch} {remote}/{branch}, or rebase it; or use --push",
    )  # fmt: skip


def _contains(git: Git, newer: str, older: str) -> bool:
    return git.run("merge-base", "--is-ancestor", older, newer, ok=(0, 1)).code == 0


def read_remote(git: Git, remote: str, branches: list[str]) -> dict[str, str]:
    """Tips of *branches* at *remote*, those that exist.

    Raises:
        CommandError: the remote cannot be read; nothing is assumed about it then.
    """
    try:
        told = git.lines(
            "ls-remote", "--", remote, *(f"refs/heads/{branch}" for branch in branches)
        )
    except GitError as error:
        raise CommandError(
            f"the remote {remote} cannot be read, so its tips are unknown; nothing was changed. {error}",
            code=ExitCode.FAILED, reason="remote", hint="check the network and the credentials, or stay local with --no-remote",
        ) from error  # fmt: skip
    pairs = (line.split("\t") for line in told)
    tips = {ref: tip for tip, ref in pairs}
    return {
        branch: tips[f"refs/heads/{branch}"]
        for branch in branches
        if f"refs/heads/{branch}" in tips
    }


def _fetch(git: Git, remote: str, branches: list[str], tips: dict[str, str]) -> None:
    """Fetch objects only: no remote-tracking ref, no FETCH_HEAD, no tags."""
    git.run("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--refmap=", "--",
            remote, *(f"refs/heads/{branch}" for branch in branches))  # fmt: skip
    for branch in branches:
        if git.commit(tips[branch]) is None:
            raise moved(f"{remote}/{branch} moved while it was fetched")


def recheck(git: Git, tips: Tips) -> None:
    """Refuse if a tip is no longer where this run found it.

    Raises:
        CommandError: a local or remote tip moved.
    """
    for line in (tips.canonical, tips.beta):
        if line.branch and (git.commit(f"refs/heads/{line.branch}") or "") != line.local:
            raise moved(
                f"the local branch {line.branch} moved from {line.local[:12] or 'nothing'} during the run"
            )
    if not tips.remote:
        return
    branches = [
        branch for branch in (tips.canonical.branch, tips.beta.branch, tips.work_branch) if branch
    ]
    now = read_remote(git, tips.remote, branches)
    before = {
        tips.canonical.branch: tips.canonical.remote,
        tips.beta.branch: tips.beta.remote,
        tips.work_branch: tips.work,
    }
    for branch in branches:
        if now.get(branch, "") != before[branch]:
            raise moved(
                f"{tips.remote}/{branch} moved from {before[branch][:12] or 'nothing'} to "
                f"{now.get(branch, '')[:12] or 'nothing'} during the run"
            )


def moved(what: str) -> CommandError:
    """The refusal for a tip that moved."""
    return CommandError(f"{what}; nothing was changed", reason="moved", hint="run it again")
