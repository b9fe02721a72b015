# SPDX-License-Identifier: Apache-2.0
"""Picks the planned commits, in the temporary work tree, with ``git cherry-pick -x``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from b12x_overlay.changes.model import plain
from b12x_overlay.console import CommandError
from b12x_overlay.git import Git
from b12x_overlay.sync.evidence import Evidence
from b12x_overlay.sync.history import HAND_TRAILER
from b12x_overlay.sync.plan import SKIP, THERE, Plan, Step

_AT_ONCE = 25
"""Commits for one git process; between two of them progress is told."""


class PickConflict(Exception):  # noqa: N818 (an outcome, not an error)
    """A pick stopped with unmerged files; the work tree shows it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.commit.id)
        self.step = step


class Picker:
    """Brings steps onto the work tree's branch; beta's version of held paths stays."""

    def __init__(self, work: Git, plan: Plan, progress: Callable[[str], None]) -> None:
        self._work = work
        self._plan = plan
        self._progress = progress

    def pick(self, steps: Sequence[Step]) -> None:
        """Pick *steps* in order; an empty pick becomes *there*, one of which only held paths were left *skip*.

        Raises:
            PickConflict: unmerged files; everything before is committed.
            GitError: git failed otherwise.
        """
        done = 0
        for batch in self._batches(steps):
            self._progress(
                f"[{done + 1}/{len(steps)}] {batch[0].commit.id[:12]} {plain(batch[0].commit.subject)}"
            )
            if self._holds(batch[0]):
                self._pick_held(batch[0])
            else:
                self._pick_batch(batch)
            done += len(batch)

    def _batches(self, steps: Sequence[Step]) -> Iterator[list[Step]]:
        for held, group in itertools.groupby(steps, key=self._holds):
            members = list(group)
            size = 1 if held else _AT_ONCE
            yield from (members[at : at + size] for at in range(0, len(members), size))

    def _holds(self, step: Step) -> bool:
        return any(path in self._plan.held for path in step.commit.paths)

    def _pick_batch(self, batch: list[Step]) -> None:
        while batch:
            stopped = self._cherry_pick(batch)
            if stopped is None:
                return
            index = next(at for at, step in enumerate(batch) if step.commit.id == stopped)
            step = batch[index]
            if not unmerged(self._work):
                self._quit()
                _empty(step)
            else:
                if (
                    len(batch) > 1
                ):  # again, alone, so that git's own --continue ends with this commit
                    self._quit()
                    self._work.run("reset", "--quiet", "--hard")
                    self._cherry_pick([step])
                record_hand_work(self._work)
                raise PickConflict(step)
            batch = batch[index + 1 :]

    def _pick_held(self, step: Step) -> None:
        stopped = self._cherry_pick([step])
        if stopped is None:
            if not self.put_back(step.commit.paths):
                _only_held(step)
            return
        self._keep_held(step.commit.paths)
        if unmerged(self._work):
            record_hand_work(self._work)
            raise PickConflict(step)
        if self._same("HEAD"):
            self._quit()
            _only_held(step)
        else:
            commit_resolution(self._work)

    def put_back(self, paths: Iterable[str] = ()) -> bool:
        """Take changes of held paths out of the last pick; False if nothing is left of it.

        A run that was killed between the pick and this leaves it to the run that goes on.
        """
        self._keep_held(paths)
        if self._same("HEAD"):
            return True
        if self._same("HEAD^"):
            self._work.run("reset", "--quiet", "--hard", "HEAD^")
            return False
        self._work.run("commit", "--quiet", "--amend", "--no-verify", "--allow-empty-message", "--no-edit",
                       "--cleanup=verbatim")  # fmt: skip
        return True

    def _cherry_pick(self, steps: Sequence[Step]) -> str | None:
        """Pick; returns the commit that stopped it, if one did."""
        ids = [step.commit.id for step in steps]
        done = self._work.run("cherry-pick", "-x", "--allow-empty-message", *ids, ok=(0, 1))
        if done.code == 0:
            return None
        stopped = self._work.commit("CHERRY_PICK_HEAD")
        if stopped is None:
            raise CommandError(
                f"git cherry-pick stopped without saying where: {done.err}", reason="git"
            )
        return stopped

    def _keep_held(self, paths: Iterable[str]) -> None:
        """Put beta's version of held paths back, or take them out again where beta has none."""
        beta = self._plan.history.beta_tip
        touched = {*paths, *unmerged(self._work)}
        touched.update(self._work.fields("diff", "--name-only", "-z", "--no-renames", beta, "HEAD"))
        for path in self._plan.held.among(touched):
            if self._work.run("cat-file", "-e", f"{beta}:{path}", ok=(0, 1, 128)).code == 0:
                self._work.run("checkout", "--quiet", beta, "--", f":(literal){path}")
            else:
                self._work.run(
                    "rm", "--quiet", "--force", "--ignore-unmatch", "--", f":(literal){path}"
                )

    def _same(self, commit: str) -> bool:
        return self._work.run("diff", "--cached", "--quiet", commit, ok=(0, 1)).code == 0

    def _quit(self) -> None:
        self._work.run("cherry-pick", "--quit")


def unmerged(work: Git) -> list[str]:
    """Paths that the index holds in several stages."""
    return sorted({entry.partition("\t")[2] for entry in work.fields("ls-files", "-u", "-z")})


def _empty(step: Step) -> None:
    step.decision = THERE
    step.evidence = Evidence("empty pick", "picking it onto beta changes nothing")


def _only_held(step: Step) -> None:
    step.decision = SKIP
    step.notes.append("nothing is left of it but what beta keeps")


def _message_file(work: Git) -> Path:
    return work.folder / work.text("rev-parse", "--git-path", "MERGE_MSG")


def _split(message: str) -> tuple[str, str]:
    """A prepared message and what git put below it for the editor."""
    at = message.find("\n# ------------------------ >8 ------------------------")
    return (message, "") if at < 0 else (message[: at + 1], message[at + 1 :])


def record_hand_work(work: Git) -> None:
    """Add a trailer for each unmerged path to the prepared message, whoever commits the resolution."""
    file = _message_file(work)
    message, rest = _split(file.read_text(encoding="utf-8", errors="surrogateescape"))
    trailers = "".join(f"{HAND_TRAILER}: {path}\n" for path in unmerged(work))
    file.write_text(
        message.rstrip("\n") + "\n" + trailers + rest, encoding="utf-8", errors="surrogateescape"
    )


def commit_resolution(work: Git, note: str = "", *, empty: bool = False) -> None:
    """Commit the resolved pick with the prepared message as it is (``--continue`` would drop lines with #).

    Args:
        note: a line to add before the trailers' last one.
        empty: record a pick of which nothing was to be brought.
    """
    message, _ = _split(_message_file(work).read_text(encoding="utf-8", errors="surrogateescape"))
    data = (message.rstrip("\n") + "\n" + note).encode("utf-8", "surrogateescape")
    flags = ["--allow-empty"] if empty else []
    work.run("commit", "--quiet", "--no-verify", "--allow-empty-message", "--cleanup=verbatim", *flags, "-F", "-",
             stdin=data)  # fmt: skip
