# SPDX-License-Identifier: Apache-2.0
"""After the picks: the sync's fragment, every check, the tree report, the tips again, and the one change of a ref."""

from __future__ import annotations

from typing import TYPE_CHECKING

from b12x_overlay.console import CommandError
from b12x_overlay.exitcodes import ExitCode
from b12x_overlay.git import Git
from b12x_overlay.sync import checks, landing, outcome
from b12x_overlay.sync.evidence import Evidence
from b12x_overlay.sync.held import last_receipt, read_tree
from b12x_overlay.sync.history import Commit, read_history, read_renames
from b12x_overlay.sync.plan import BRING, THERE
from b12x_overlay.sync.record import Record, ids_at, is_record, make_record, utc_today
from b12x_overlay.sync.state import State
from b12x_overlay.sync.tips import Tips, read_remote, recheck
from b12x_overlay.sync.treereport import compare
from b12x_overlay.sync.workspace import require_identity

if TYPE_CHECKING:
    from b12x_overlay.sync.run import Run


def finish(run: Run, work: Git, state: State) -> None:
    """Check the work tree's branch and land it; the outcome says how it ended.

    Raises:
        CommandError: a check failed or a tip moved; neither line was changed.
    """
    found, tips, lines = run.found, run.tips, run.options.lines
    _settle(run, work)
    brought = run.plan.having(BRING)
    if brought:
        found.fragment = _add_record(run, work)
    found.result = work.text("rev-parse", "HEAD")
    changed = found.result != tips.beta.tip and found.result != run.start
    if changed:
        run.console.progress("checking the synced tree")
        receipt = last_receipt(work, tips.beta.tip, lines)
        checks.check_held(work, run.plan.held, tips.beta.tip)
        found.checks.append(checks.check_fragments(work, lines, receipt))
        found.checks.append(checks.check_patches(work, lines))
    _report_tree(run, work)
    if not changed:
        found.kind = outcome.NOTHING
        return
    if run.options.dry_run:
        found.kind = outcome.WOULD_SYNC
        return
    run.console.progress("reading the tips again")
    repo = run.where.repo
    recheck(repo, tips)
    assert run.store is not None
    state.landing = found.result
    run.store.write(state)
    if run.options.mode == "land":
        landing.land(repo, tips, found.result)
        found.landed = tips.beta.branch
    else:
        landing.push(repo, tips, found.result)
        found.landed = f"{tips.remote}/{tips.work_branch}"
    found.kind = outcome.SYNCED
    state.waiting = False


def _new_commits(run: Run, work: Git, since: str) -> tuple[Commit, ...]:
    return read_history(work, since, "HEAD").beta


def _settle(run: Run, work: Git) -> None:
    """Give each step the commit that carries it; what left none is there already."""
    carriers = {
        cited: commit
        for commit in _new_commits(run, work, run.start)
        for group in commit.picked_from[-1:]
        for cited in group[-1:]
    }
    for step in run.plan.having(BRING):
        carrier = carriers.get(step.commit.id)
        if carrier is None:
            step.decision, step.evidence = (
                THERE,
                Evidence("empty pick", "picking it onto beta changes nothing"),
            )
        elif not carrier.changes:
            step.decision = THERE
            step.evidence = Evidence(
                "empty pick", "resolved by hand: beta has it in another form", (carrier.id,)
            )
        else:
            step.result = carrier.id


def _add_record(run: Run, work: Git) -> str:
    """Write and commit the sync's own fragment; replaces the one of an earlier run that beta has not got yet."""
    lines, tips, plan = run.options.lines, run.tips, run.plan
    picked = {
        cited
        for commit in _new_commits(run, work, tips.beta.tip)
        if commit.changes
        for group in commit.picked_from[-1:]
        for cited in group[-1:]
    }
    commits = [commit for commit in plan.history.canonical if commit.id in picked]
    taken = ids_at(work, tips.beta.tip, lines.folder) | ids_at(
        work, tips.canonical.tip, lines.folder
    )
    pins = sorted({path for commit in commits for path in commit.paths if plan.held.pin(path)})
    record = make_record(commits, lines, taken, pins, utc_today())
    on_beta = read_tree(work, tips.beta.tip, lines.folder)
    for path in read_tree(work, "HEAD", lines.folder):
        if is_record(path, lines) and path not in on_beta and path != record.path:
            work.run("rm", "--quiet", "--", f":(literal){path}")
    _write(work, record)
    if work.run("diff", "--cached", "--quiet", "HEAD", ok=(0, 1)).code:
        who = require_identity(run.where.repo)
        author = {key.replace("COMMITTER", "AUTHOR"): value for key, value in who.items()}
        work.with_variables(**who, **author).run(
            "commit",
            "--quiet",
            "--no-verify",
            "--cleanup=verbatim",
            "-F",
            "-",
            stdin=f"{record.subject}\n".encode(),
        )
    return record.id


def _write(work: Git, record: Record) -> None:
    path = work.folder / record.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record.data)
    work.run("add", "--force", "--", f":(literal){record.path}")


def _report_tree(run: Run, work: Git) -> None:
    plan, used = run.plan, run.plan.matching.used
    own = [one for one in plan.history.beta if one.id not in used or one.resolved_by_hand]
    own += [
        one
        for one in _new_commits(run, work, run.start)
        if not one.picked_from or one.resolved_by_hand
    ]
    commits = [one.id for one in (*plan.history.canonical, *plan.history.beta) if not one.is_merge]
    renames = [pair for pairs in read_renames(work, commits).values() for pair in pairs]
    run.found.tree = compare(work, run.tips.canonical.tip, "HEAD", own, plan.held, renames)
    unexplained = [difference.path for difference in run.found.tree if not difference.explained]
    if unexplained:
        raise CommandError(
            f"{len(unexplained)} differences between canonical and the synced beta are explained by nothing: "
            + ", ".join(unexplained[:10]) + (" …" if len(unexplained) > 10 else "") + "; nothing was changed",
            reason="tree",
            hint="give beta (or canonical) a commit that makes the files equal, or name a version pin that beta keeps "
            "in [[sync.keep]] of the lines file",
        )  # fmt: skip


def require_local_beta(tips: Tips) -> None:
    """--land needs a local branch to move.

    Raises:
        CommandError: there is none.
    """
    if not tips.beta.local:
        raise CommandError(
            f"--land moves a local branch, and there is no local {tips.beta.branch}", code=ExitCode.USAGE,
            reason="beta", hint=f"git branch {tips.beta.branch} {tips.remote}/{tips.beta.branch}, or use --push",
        )  # fmt: skip


def has_landed(repo: Git, state: State) -> bool:
    """Whether a run that was killed at its very end had done its work."""
    if not state.landing:
        return False
    tips = Tips.from_json(state.tips)
    if repo.commit(f"refs/heads/{tips.beta.branch}") == state.landing:
        return True
    if state.options["mode"] != "push":
        return False
    return read_remote(repo, tips.remote, [tips.work_branch]).get(tips.work_branch) == state.landing
