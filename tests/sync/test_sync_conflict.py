# SPDX-License-Identifier: Apache-2.0
"""A conflict is told with place and sides, resolved by hand, gone on with, or taken away; nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync.repos import TEXT, Repo, Told

RESOLVED = TEXT.replace("line 3\n", "both\n")


@pytest.fixture
def parted(repo: Repo) -> Repo:
    """beta and canonical change the same line; canonical has one change before and one after."""
    repo.on("main").edit("before", 20, "before")
    repo.edit(
        "#7: clash\n\n# a line with the sign\n",
        3,
        "canonical three",
        author="Émile Zola <emile@example.org>",
    )
    repo.edit("after", 30, "after")
    repo.on("beta").edit("own", 3, "beta three")
    repo.git("switch", "-q", "--detach")
    return repo


def tree_of(told: Told) -> Path:
    assert told.code == 5, told.err
    return Path(told.json["conflict"]["commands"][0].removeprefix("cd "))


def resolve(repo: Repo, tree: Path, text: str = RESOLVED) -> None:
    both = text if text != RESOLVED else (tree / "code.py").read_text()
    if text == RESOLVED:
        start, end = both.index("<<<<<<<"), both.index("\n", both.index(">>>>>>>"))
        both = both[:start] + "beta canonical three" + both[end:]
    (tree / "code.py").write_text(both)
    repo.git("-C", str(tree), "add", "code.py")


def test_a_conflict_names_commit_place_sides_and_commands(parted: Repo) -> None:
    before = parted.snapshot()
    tips = parted.tip("main"), parted.tip("beta")
    told = parted.sync("--land")
    assert (told.code, told.json["outcome"]) == (5, "conflict")
    assert (parted.tip("main"), parted.tip("beta")) == tips
    conflict = told.json["conflict"]
    assert conflict["commit"] == parted.tip("main~1")
    (place,) = conflict["places"]
    assert (place["path"], place["line"]) == ("code.py", 3)
    assert place["beta"] == ["beta three"]
    assert place["canonical"] == ["canonical three"]
    for word in (
        "code.py:3",
        "beta three",
        "canonical three",
        "--continue",
        "--abort",
        "git add code.py",
    ):
        assert word in told.err
    aborted = parted.sync("--abort")
    assert (aborted.code, aborted.json["outcome"]) == (0, "aborted"), aborted.err
    assert parted.snapshot() == before
    assert not tree_of(told).parent.exists()


def test_resolve_and_continue(parted: Repo) -> None:
    clash = parted.tip("main~1")
    tree = tree_of(parted.sync("--land"))
    resolve(parted, tree)
    told = parted.sync("--continue")
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err
    assert parted.subjects("main~3..beta") == [
        "own",
        "before",
        "#7: clash",
        "after",
        "Record the canonical sync 20261002",
    ]
    picked = parted.tip("beta~2")
    assert parted.git("log", "-1", "--format=%an", picked) == "Émile Zola"
    message = parted.message(picked)
    assert "# a line with the sign" in message
    assert f"(cherry picked from commit {clash})" in message
    assert "Sync-Resolved-By-Hand: code.py" in message
    assert not tree.exists()
    again = parted.sync("--land")
    assert (again.code, again.json["outcome"]) == (0, "nothing-to-do"), again.err


@pytest.mark.parametrize("how", ["commit", "cherry-pick --continue"])
def test_a_resolution_that_the_user_committed(parted: Repo, how: str) -> None:
    tree = tree_of(parted.sync("--land"))
    resolve(parted, tree)
    parted.git("-C", str(tree), *(how.split() if "pick" in how else ["commit", "--no-edit"]))
    told = parted.sync("--continue")
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err
    assert parted.sync("--land").json["outcome"] == "nothing-to-do"


def test_a_resolution_that_keeps_betas_side_is_remembered(parted: Repo) -> None:
    """Otherwise the next run would stop at the same place again."""
    tree = tree_of(parted.sync("--land"))
    parted.git("-C", str(tree), "checkout", "HEAD", "--", "code.py")
    told = parted.sync("--continue")
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err
    assert "beta three\n" in parted.file("beta", "code.py")
    again = parted.sync("--land")
    assert (again.code, again.json["outcome"]) == (0, "nothing-to-do"), again.err


def test_continue_refuses_what_is_not_resolved(parted: Repo) -> None:
    tree = tree_of(parted.sync("--land"))
    tips = parted.tip("main"), parted.tip("beta")
    told = parted.sync("--continue")
    assert (told.code, told.json["error"]["reason"]) == (3, "unresolved")
    assert "code.py" in told.err
    parted.git("-C", str(tree), "add", "code.py")  # with its markers
    told = parted.sync("--continue")
    assert (told.code, told.json["error"]["reason"]) == (3, "unresolved")
    assert "markers" in told.err
    resolve(parted, tree)
    (tree / "other.py").write_text("unstaged\n")
    told = parted.sync("--continue")
    assert (told.code, told.json["error"]["reason"]) == (3, "unresolved")
    assert "other.py" in told.err
    assert (parted.tip("main"), parted.tip("beta")) == tips
    parted.git("-C", str(tree), "checkout", "--", "other.py")
    assert parted.sync("--continue").code == 0


def test_continue_refuses_what_is_staged_but_not_committed(parted: Repo) -> None:
    tree = tree_of(parted.sync("--land"))
    resolve(parted, tree)
    parted.git("-C", str(tree), "commit", "--no-edit")
    (tree / "other.py").write_text("more\n")
    parted.git("-C", str(tree), "add", "other.py")
    told = parted.sync("--continue")
    assert (told.code, told.json["error"]["reason"]) == (3, "unresolved")
    assert "git commit" in told.err


def test_a_second_conflict_after_the_first(parted: Repo) -> None:
    parted.on("beta").edit("own again", 30, "beta thirty")
    parted.git("switch", "-q", "--detach")
    tree = tree_of(parted.sync("--land"))
    resolve(parted, tree)
    told = parted.sync("--continue")
    assert tree_of(told) == tree
    assert told.json["conflict"]["subject"] == "after"
    resolve(parted, tree)
    told = parted.sync("--continue")
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err


def test_a_new_run_does_not_throw_a_resolution_away(parted: Repo) -> None:
    tree = tree_of(parted.sync("--land"))
    resolve(parted, tree)
    told = parted.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "unfinished")
    assert "--continue" in told.err
    assert (tree / "code.py").exists()
    assert parted.sync("--dry-run").code == 5  # a dry run leaves it alone too
    assert parted.sync("--continue").code == 0


def test_a_resolution_survives_a_failed_check_and_a_moved_beta(parted: Repo) -> None:
    tree = tree_of(parted.sync("--land"))
    resolve(parted, tree)
    old = parted.tip("beta")
    parted.on("beta").edit("meanwhile", 38, "x")
    parted.git("switch", "-q", "--detach")
    told = parted.sync("--continue")
    assert (told.code, told.json["error"]["reason"]) == (3, "moved")
    assert tree.exists()
    parted.git("branch", "-f", "beta", old)
    told = parted.sync("--continue")
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err


def test_continue_and_abort_without_a_run(repo: Repo) -> None:
    for flag in ("--continue", "--abort"):
        told = repo.sync(flag)
        assert (told.code, told.json["error"]["reason"]) == (3, "no-run")


def test_a_work_tree_that_has_gone(parted: Repo) -> None:
    import shutil

    tree = tree_of(parted.sync("--land"))
    shutil.rmtree(tree)
    told = parted.sync("--continue")
    assert (told.code, told.json["error"]["reason"]) == (3, "no-worktree")
    assert parted.sync("--abort").code == 0
    assert parted.sync("--dry-run").code == 5


def test_a_dry_run_tells_the_conflict_and_leaves_nothing(parted: Repo) -> None:
    before = parted.snapshot()
    told = parted.sync("--dry-run")
    assert told.code == 5
    assert told.json["conflict"]["places"][0]["line"] == 3
    assert told.json["conflict"]["commands"] == []
    assert parted.snapshot() == before


@pytest.mark.parametrize(
    ("canonical", "beta", "kind"),
    [
        ({"other.py": None}, {"other.py": "changed\n"}, "canonical deleted"),
        ({"other.py": TEXT + "more\n"}, {"other.py": None}, "beta deleted"),
        ({"new.py": "a\n"}, {"new.py": "b\n"}, "both added"),
        ({"bin": b"\0a"}, {"bin": b"\0b"}, "cannot be merged as text"),
    ],
)
def test_kinds_of_conflict(repo: Repo, canonical: dict, beta: dict, kind: str) -> None:
    repo.on("main").commit("theirs", canonical)
    repo.on("beta").commit("own", beta)
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--dry-run")
    assert told.code == 5
    (place,) = told.json["conflict"]["places"]
    assert place["path"] in canonical
    assert kind in place["kind"]


def test_markers_in_a_files_own_text_are_not_taken_for_conflicts(repo: Repo) -> None:
    own = "<<<<<<< yours\na\n=======\nb\n>>>>>>> theirs\n"
    repo.on("main").commit("base", {"doc.md": own + TEXT})
    repo.git("branch", "-f", "beta", "main")
    repo.edit("theirs", 20, "x", name="doc.md")
    repo.on("beta").edit("own", 20, "y", name="doc.md")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert [place["line"] for place in told.json["conflict"]["places"]] == [20]
    tree = tree_of(told)
    (tree / "doc.md").write_text(own + TEXT)
    repo.git("-C", str(tree), "add", "doc.md")
    assert repo.sync("--continue").code == 0


def test_hostile_text_cannot_drive_the_terminal(repo: Repo) -> None:
    repo.on("main").edit("red \x1b[31m subject", 3, "evil \x1b]0;title\x07 line")
    repo.on("beta").edit("own", 3, "beta")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--dry-run")
    assert told.code == 5
    assert "\x1b" not in told.err
    assert "\x07" not in told.err
