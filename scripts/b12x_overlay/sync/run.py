# SPDX-License-Identifier: Apache-2.0
"""One sync, from the tips to the moved ref: start, go on after a conflict, take an unfinished one away."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from b12x_overlay.changes.model import plain
from b12x_overlay.console import CommandError, Console
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git, require_version
from b12x_overlay.lines import Keep, Lines
from b12x_overlay.sync import finish, outcome, resume
from b12x_overlay.sync.conflict import find_clashes
from b12x_overlay.sync.held import Held, check_rules, find_held, last_receipt
from b12x_overlay.sync.history import read_history
from b12x_overlay.sync.landing import refuse_checked_out
from b12x_overlay.sync.outcome import Outcome
from b12x_overlay.sync.picking import PickConflict, Picker
from b12x_overlay.sync.plan import BRING, Plan, Step, make_plan
from b12x_overlay.sync.state import State, Store
from b12x_overlay.sync.tips import Tips, find_tips
from b12x_overlay.sync.workbranch import start_of
from b12x_overlay.sync.workspace import (
    Places,
    add_worktree,
    new_worktree_path,
    open_repository,
    places,
    require_identity,
)


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    repo: Path
    canonical: str
    beta: str
    remote: str | None
    """The remote's name, '' for none, None for the configured one if the repository has it."""
    mode: str
    """land or push."""
    dry_run: bool
    lines: Lines
    command: str
    """How this command was called, for the ways out that are printed."""

    def as_json(self) -> dict[str, Any]:
        value = dataclasses.asdict(self)
        return {**value, "repo": str(self.repo)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Options:
        lines = {**value["lines"], "keep": tuple(Keep(**rule) for rule in value["lines"]["keep"])}
        return cls(**{**value, "repo": Path(value["repo"]), "lines": Lines(**lines)})


class Run:
    """The parts of one sync that do not change while it runs."""

    def __init__(
        self, options: Options, console: Console, where: Places, store: Store | None, found: Outcome
    ) -> None:
        self.options = options
        self.console = console
        self.where = where
        self.store = store
        self.found = found
        self.start = ""
        """The commit on which the picks are put: beta's tip, or the pull request's branch that stands on it."""

    @property
    def tips(self) -> Tips:
        assert self.found.tips is not None
        return self.found.tips

    @property
    def plan(self) -> Plan:
        assert self.found.plan is not None
        return self.found.plan

    def make_plan(self) -> None:
        """Decide for every commit, and print it."""
        objects, lines, tips = self.where.objects, self.options.lines, self.tips
        self.found.warnings = check_rules(objects, tips.canonical.tip, tips.beta.tip, lines)
        for warning in self.found.warnings:
            self.console.progress(f"{self.console.paint('warning:', 'yellow')} {plain(warning)}")
        history = read_history(objects, tips.canonical.tip, self.start)
        receipt = last_receipt(objects, tips.beta.tip, lines)
        held: Held = find_held(objects, tips.beta.tip, lines, receipt)
        self.found.plan = make_plan(objects, history, held, lines.folder)
        outcome.print_plan(self.console, self.plan)
        self.found.refusals = self.plan.refusals

    def pick(self, work: Git, steps: list[Step], state: State) -> bool:
        """Pick *steps*; False after a conflict, which is then described and left in the work tree."""
        try:
            Picker(work, self.plan, self.console.progress).pick(steps)
        except PickConflict as conflict:
            self.found.kind = outcome.CONFLICT
            self.found.conflict = conflict.step
            self.found.clashes = find_clashes(work)
            if self.store is not None:
                state.waiting = True
                state.stopped_at = conflict.step.commit.id
                self.store.write(state)
                self.found.commands = resume.commands(
                    work, self.options.command, self.found.clashes
                )
            return False
        return True


def sync(options: Options, console: Console, found: Outcome) -> None:
    """Start a sync; what it finds out goes to *found*.

    Raises:
        CommandError: refused, or git failed; neither line was changed.
    """
    require_version()
    repo = open_repository(options.repo)
    if options.dry_run:
        with places(repo, dry_run=True) as where:
            _sync(Run(options, console, where, None, found))
        return
    require_identity(repo)
    store = Store(repo)
    with store.lock(), places(repo, dry_run=False) as where:
        _take_leftover_away(repo, store, options, console)
        _sync(Run(options, console, where, store, found))


def _sync(run: Run) -> None:
    options, repo, found = run.options, run.where.repo, run.found
    remote = options.remote
    if remote is None:
        remote = options.lines.remote if options.lines.remote in repo.lines("remote") else ""
    elif remote:
        _require_remote(repo, remote)
    run.console.progress("reading the tips" + (f" of {remote}" if remote else ""))
    push = options.mode == "push"
    if push and not remote:
        raise CommandError(
            f"--push needs a remote, and {repo.folder} has none called {options.lines.remote}", code=ExitCode.USAGE,
            reason="remote", hint="name one with --remote, or use --land",
        )  # fmt: skip
    found.tips = find_tips(
        repo,
        run.where.objects,
        options.canonical,
        options.beta,
        remote,
        options.lines.work_branch,
        push,
    )
    if options.mode == "land":
        finish.require_local_beta(found.tips)
        refuse_checked_out(repo, found.tips.beta.branch)
    run.start = (
        start_of(run.where.objects, found.tips, options.lines) if push else found.tips.beta.tip
    )
    run.make_plan()
    if found.refusals:
        found.kind = outcome.REFUSED
        return
    # without a slash: a branch called like a part of the name would be in its way
    _in_worktree(run, f"{options.lines.work_branch.replace('/', '-')}-run")


def _require_remote(repo: Git, remote: str) -> None:
    """A bare word has to be a remote's name; a URL or a path is git's to try.

    Raises:
        CommandError: it is not; the remotes are named.
    """
    known = repo.lines("remote")
    if remote not in known and not {"/", ":"} & set(remote) and not (repo.folder / remote).exists():
        raise CommandError(
            f"--remote {remote}: {repo.folder} has no remote of that name; it has: {', '.join(known) or 'none'}",
            code=ExitCode.USAGE, reason="remote", hint="name one of them, or stay local with --no-remote",
        )  # fmt: skip


def _in_worktree(run: Run, branch: str) -> None:
    """Pick and finish in a temporary work tree, which goes again unless it holds a person's work."""
    home, options = run.where.home, run.options
    if home.commit(f"refs/heads/{branch}") is not None:
        raise CommandError(
            f"the branch {branch} exists, and no unfinished sync made it; nothing was changed", reason="branch",
            hint=f"git -C {home.folder} branch -m {branch} OTHER-NAME, or name another with --work-branch",
        )  # fmt: skip
    state = State(
        str(new_worktree_path()), branch, run.start, run.tips.as_json(), options.as_json()
    )
    try:
        if run.store is not None:
            run.store.write(state)
        work = add_worktree(home, Path(state.worktree), branch, run.start)
        if run.pick(work, run.plan.having(BRING), state):
            finish.finish(run, work, state)
    finally:
        if run.store is None:
            shutil.rmtree(Path(state.worktree).parent, ignore_errors=True)
        elif not state.waiting:
            run.store.discard(state)


def _take_leftover_away(repo: Git, store: Store, options: Options, console: Console) -> None:
    """Clean up after a killed run; refuse where a person's work would be lost."""
    state = store.read()
    if state is None:
        return
    if state.waiting and not finish.has_landed(repo, state):
        raise CommandError(
            f"an unfinished sync waits in {state.worktree}; nothing was changed", reason="unfinished",
            hint=f"{options.command} --continue, or {options.command} --abort",
        )  # fmt: skip
    console.progress(f"taking away what a stopped run left in {state.worktree}")
    store.discard(state)


def go_on(repo_path: Path, command: str, console: Console, found: Outcome) -> None:
    """Go on with a sync whose conflict was resolved in its work tree.

    Raises:
        CommandError: not resolved yet, or refused later; the work tree stays until all is well or --abort.
    """
    repo = open_repository(repo_path)
    require_identity(repo)
    store = Store(repo)
    with store.lock(), places(repo, dry_run=False) as where:
        state = store.read()
        work = resume.open_worktree(repo, state, command)
        assert state is not None
        options = Options.from_json({**state.options, "command": command})
        run = Run(options, console, where, store, found)
        found.tips, run.start = Tips.from_json(state.tips), state.start
        if not finish.has_landed(repo, state):
            run.make_plan()
            resume.take_resolution(work, state.stopped_at, run.plan.held, options.lines)
            Picker(work, run.plan, console.progress).put_back()
            steps = resume.remaining(work, state.start, run.plan.having(BRING))
            if not run.pick(work, steps, state):
                return
            finish.finish(run, work, state)
        store.discard(state)


def abort(repo_path: Path, command: str, console: Console, found: Outcome) -> None:
    """Take an unfinished sync away.

    Raises:
        CommandError: there is none.
    """
    repo = open_repository(repo_path)
    store = Store(repo)
    with store.lock():
        state = store.read()
        if state is None:
            raise CommandError(
                f"no sync is unfinished in {repo.folder}", reason="no-run", hint=f"{command} --help"
            )
        head = repo.commit(f"refs/heads/{state.branch}")
        store.discard(state)
        if head and head != state.start:
            console.say(
                f"what it had picked can still be seen for a while: git -C {repo.folder} log {head[:12]}"
            )
        found.kind = outcome.ABORTED
