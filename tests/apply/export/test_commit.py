# SPDX-License-Identifier: Apache-2.0
"""apply --commit: one commit per patch in a git checkout."""

from __future__ import annotations

from pathlib import Path

from apply.checkouts import git
from apply.conftest import A
from apply.factory import Project, Series, place, snapshot


def test_one_commit_per_patch(made: Project, checkout: Path, series: Series) -> None:
    document = made.json("--target", checkout, "--commit")
    assert document["exit"] == 0
    assert git(checkout, "log", "--format=%s|%an|%cn").splitlines() == [
        "second|A|Tester", "first|A|Tester", "vLLM|Tester|Tester",
    ]  # fmt: skip
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "show", "--name-only", "--format=", "HEAD^").splitlines() == ["vllm/a.py"]
    for path, data in series.final().items():
        assert (checkout / path).read_bytes() == data
    assert made.run("status", "--target", checkout).code == 0
    head = git(checkout, "rev-parse", "HEAD")
    assert made.json("--target", checkout, "--commit")["outcome"] == "already applied"
    assert git(checkout, "rev-parse", "HEAD") == head


def test_an_applied_tree_only_gets_the_commits(made: Project, checkout: Path) -> None:
    made.run("--target", checkout)
    assert made.run("--target", checkout, "--commit").code == 0
    assert git(checkout, "status", "--porcelain") == ""
    assert len(git(checkout, "log", "--oneline").splitlines()) == 3


def test_a_dry_run_makes_nothing(made: Project, checkout: Path) -> None:
    before = snapshot(checkout)
    assert made.run("--target", checkout, "--commit", "--dry-run").code == 1
    assert {key: value for key, value in snapshot(checkout).items() if ".git/" not in key} == {
        key: value for key, value in before.items() if ".git/" not in key
    }
    assert len(git(checkout, "log", "--oneline").splitlines()) == 1


def test_staged_changes_are_not_swept_into_a_patch(made: Project, checkout: Path) -> None:
    place(checkout, "mine.txt", b"mine\n")
    git(checkout, "add", "mine.txt")
    result = made.run("--target", checkout, "--commit")
    assert result.code == 3
    assert "staged" in result.err
    assert len(git(checkout, "log", "--oneline").splitlines()) == 1


def test_other_edits_stay_out_and_stay_there(made: Project, checkout: Path) -> None:
    place(checkout, "vllm/__init__.py", b"# mine\n")
    assert made.run("--target", checkout, "--commit").code == 0
    assert git(checkout, "status", "--porcelain").split() == ["M", "vllm/__init__.py"]


def test_no_checkout(made: Project, tree: Path) -> None:
    git(tree.parent, "init", "--quiet")  # a repository further up is not the target's
    result = made.run("--target", tree, "--commit")
    assert result.code == 3
    assert "not the top folder of a git checkout" in result.err


def test_an_older_head_is_refused(made: Project, checkout: Path) -> None:
    place(checkout, "vllm/a.py", A + b"# 0.32\n")
    git(checkout, "commit", "--quiet", "--all", "--message", "other")
    before = git(checkout, "rev-parse", "HEAD")
    assert made.run("--target", checkout, "--commit").code == 3
    assert git(checkout, "rev-parse", "HEAD") == before
    assert (checkout / "vllm/a.py").read_bytes() == A + b"# 0.32\n"


def test_the_series_also_goes_in_with_git_am(
    made: Project, exported: Path, tmp_path: Path, series: Series
) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(exported), str(clone))
    git(clone, "reset", "--quiet", "--hard", "HEAD~2")
    git(
        clone,
        "am",
        "--quiet",
        "--keep-non-patch",
        *(str(made.root / f"patches/{n}.patch") for n in ("first", "second")),
    )
    for path in series.base:
        assert (clone / path).read_bytes() == series.final()[path]


def test_a_head_that_holds_the_set_without_a_series(made: Project, checkout: Path) -> None:
    """The tree that the first command of the README leaves, put under git."""
    assert made.run("--target", checkout).code == 0
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--amend", "--message", "patched vLLM")
    head = git(checkout, "rev-parse", "HEAD")
    result = made.run("--target", checkout, "--commit")
    assert result.code == 3
    assert "holds the set, but not as one commit per patch" in result.err
    assert git(checkout, "rev-parse", "HEAD") == head
    assert made.run("revert", "--target", checkout).code == 0
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "vLLM")
    assert made.run("--target", checkout, "--commit").code == 0
    assert made.json("export", "--target", checkout)["exit"] == 0
