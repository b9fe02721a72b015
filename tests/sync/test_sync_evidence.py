# SPDX-License-Identifier: Apache-2.0
"""What is already on beta is found, by the first evidence that holds, and nothing else is taken for it."""

from __future__ import annotations

import pytest
from sync.repos import TEXT, Repo, one_fragment


def land(repo: Repo) -> dict[str, str]:
    """Sync and return the decisions; the lines' trees must agree apart from the sync's fragment."""
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.code == 0, told.err
    again = repo.sync("--land")
    assert (again.code, again.json["outcome"]) == (0, "nothing-to-do"), again.err
    return told.decisions()


def same_code(repo: Repo) -> None:
    assert repo.git("diff", "--stat", "main", "beta", "--", ":!changes/*-canonical-sync-*") == ""


def test_the_three_changes_of_the_fork_are_already_there(repo: Repo) -> None:
    """Beta merged first; one twin pull request carries them to canonical with trailers and the same fragments.

    The import block of the second file was in conflict, because each line has an import of its own there.
    """
    imports = "import a\nimport m\nimport z\n"
    repo.on("main").commit("imports", {"b12x.py": imports + TEXT})
    repo.git("branch", "-f", "beta", "main")
    repo.on("beta").commit(
        "[beta] other work", {"b12x.py": imports.replace("import m", "import beta_only, m") + TEXT}
    )
    repo.git("switch", "-q", "-c", "feature")
    first = repo.commit(
        "A4 prefill for W4A16 experts (#970)",
        {
            "b12x.py": "import a\nimport beta_only, envs, m\nimport z\n" + TEXT + "def a4(): ...\n",
            **one_fragment(
                "vllm-b12x-w4a16-a4-prefill",
                pull_requests=[970],
                requires=["b12x-w4a16-a4-prefill"],
            ),
        },
    )
    second = repo.edit("Zero the input scales (#976)", 5, "zeros", name="other.py")
    third = repo.edit(
        "Split by row type (#977)", 9, "rows", files=one_fragment("vllm-b12x-a4-prefill-row-type")
    )
    repo.on("beta").git("merge", "-q", "--no-ff", "-m", "Merge #970, #976, #977", "feature")

    repo.on("main")
    repo.git("cherry-pick", "-x", first, ok=(1,))
    repo.write({"b12x.py": "import a\nimport envs, m\nimport z\n" + TEXT + "def a4(): ...\n"})
    repo.git("add", "-A")
    repo.git("-c", "core.commentChar=;", "cherry-pick", "--continue")
    repo.pick(second)
    repo.pick(third)

    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"]) == (0, "nothing-to-do"), told.err
    assert set(told.decisions().values()) == {"there: trailer"}
    assert {one["path"]: one["reason"] for one in told.json["tree"]} == {"b12x.py": "beta-only"}
    assert "picked from beta's" in told.err  # the evidence is printed


def test_trailer_on_beta(repo: Repo) -> None:
    change = repo.on("main").edit("change", 3, "x")
    repo.on("beta").edit("own", 20, "beta")
    repo.pick(change)
    assert land(repo) == {"change": "there: trailer"}


def test_trailer_on_canonical(repo: Repo) -> None:
    change = repo.on("beta").edit("change", 3, "x")
    repo.on("main").edit("own", 20, "main")
    repo.pick(change)
    assert land(repo) == {"own": "bring", "change": "there: trailer"}
    same_code(repo)


def test_both_picked_from_a_third_line(repo: Repo) -> None:
    repo.git("switch", "-q", "-c", "upstream", "main")
    change = repo.edit("change", 3, "x")
    repo.on("main").edit("own", 4, "main")  # close by, so that the patch-ids differ
    repo.git("cherry-pick", "-x", change, ok=(1,))
    repo.write({"code.py": TEXT.replace("line 3\n", "x\n").replace("line 4\n", "main\n")})
    repo.git("add", "-A")
    repo.git("cherry-pick", "--continue")
    repo.on("beta").pick(change)
    repo.git("switch", "-q", "--detach")
    assert repo.sync("--dry-run").decisions()["change"] == "there: trailer"


def test_shortened_trailer_and_a_pick_of_a_pick(repo: Repo) -> None:
    change = repo.on("beta").edit("change", 3, "x")
    repo.on("main").commit(f"change\n\n(cherry picked from commit {change[:9]})\n(cherry picked from commit {'1' * 40})",
                           {"code.py": TEXT.replace("line 3\n", "x\n")})  # fmt: skip
    assert land(repo) == {"change": "there: trailer"}


def test_a_squash_of_picks_counts_only_if_all_are_there(repo: Repo) -> None:
    one = repo.on("beta").edit("one", 3, "x")
    body = f"* one\n\n(cherry picked from commit {one})\n\n* two\n\n(cherry picked from commit {'2' * 40})\n"
    text = TEXT.replace("line 3\n", "x\n").replace("line 20\n", "y\n")
    repo.on("main").commit(f"squash\n\n{body}", {"code.py": text})
    assert land(repo) == {"squash": "bring"}
    same_code(repo)


def test_a_trailer_that_names_nothing_known_is_no_evidence(repo: Repo) -> None:
    text = TEXT.replace("line 3\n", "x\n")
    repo.on("main").commit(f"change\n\n(cherry picked from commit {'3' * 40})", {"code.py": text})
    assert land(repo) == {"change": "bring"}


def test_a_quoted_trailer_is_no_trailer(repo: Repo) -> None:
    other = repo.on("beta").edit("other", 30, "beta")
    text = TEXT.replace("line 3\n", "x\n")
    repo.on("main").commit(
        f"change\n\nUnlike > (cherry picked from commit {other}) this is new.", {"code.py": text}
    )
    assert land(repo) == {"change": "bring"}


def test_patch_id(repo: Repo) -> None:
    repo.on("main").edit("change", 3, "x")
    repo.on("beta").edit("own", 20, "beta")
    repo.edit("the same under another name", 3, "x")
    assert land(repo) == {"change": "there: patch-id"}


def test_patch_id_keeps_whitespace(repo: Repo) -> None:
    """In Python an indentation is the change; git's default patch-id cannot tell these two apart."""
    repo.on("main").commit("base", {"w.py": "if a:\n    b\nc\n"})
    repo.git("branch", "-f", "beta", "main")
    repo.edit("indent", 3, "    c", name="w.py")
    repo.on("beta").edit("indent deeper", 3, "        c", name="w.py")
    repo.git("switch", "-q", "--detach")
    assert repo.sync("--dry-run").decisions() == {"indent": "bring"}


def test_patch_id_sees_modes_and_binary_files(repo: Repo) -> None:
    repo.on("main").commit("base", {"bin": b"\0a", "run": "x\n"})
    repo.git("branch", "-f", "beta", "main")
    repo.commit("binary", {"bin": b"\0b"})
    repo.on("beta").commit("another binary", {"bin": b"\0c"})
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--dry-run")
    assert told.code == 5  # not taken for the same change
    assert told.decisions() == {"binary": "bring"}

    (repo.path / "run").chmod(0o755)
    repo.git("switch", "-q", "-C", "main", "beta")
    repo.git("update-index", "--chmod=+x", "run")
    repo.git("commit", "-qm", "mode")
    repo.git("switch", "-q", "--detach")
    repo.git("reset", "-q", "--hard")
    assert land(repo) == {"mode": "bring"}
    assert repo.git("ls-tree", "beta", "run").startswith("100755")


def test_a_change_that_was_reverted_and_landed_again_needs_a_second_twin(repo: Repo) -> None:
    first = repo.on("main").edit("change", 3, "x")
    repo.on("beta").pick(first)
    repo.on("main").git("revert", "--no-edit", first)
    repo.edit("change again", 3, "x")
    decisions = land(repo)
    assert decisions == {
        "change": "there: trailer",
        'Revert "change"': "bring",
        "change again": "bring",
    }
    same_code(repo)


def test_one_patch_on_beta_stands_for_one_on_canonical(repo: Repo) -> None:
    first = repo.on("main").edit("change", 3, "x")
    repo.git("revert", "--no-edit", first)
    repo.edit("change again", 3, "x")
    repo.on("beta").edit("the same, no trailer", 3, "x")
    decisions = land(repo)
    assert decisions == {
        "change": "there: patch-id",
        'Revert "change"': "bring",
        "change again": "bring",
    }
    same_code(repo)


def test_a_second_pick_of_the_same_commit_needs_a_second_twin(repo: Repo) -> None:
    source = repo.on("beta").edit("change", 3, "x")
    first = repo.on("main").pick(source)
    repo.git("revert", "--no-edit", first)
    repo.pick(source)
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert [step["decision"] for step in told.json["plan"]] == ["there", "bring", "bring"]
    same_code(repo)


def test_an_old_commit_picked_again_on_canonical_is_new_to_beta(repo: Repo) -> None:
    """Its trailer names a commit that beta has; but both lines had taken that one back."""
    old = repo.on("main").edit("change", 3, "x")
    repo.git("revert", "--no-edit", old)
    repo.git("branch", "-f", "beta", "main")
    repo.pick(old)
    assert land(repo) == {"change": "bring"}
    same_code(repo)


def test_fragment_of_a_squash_merged_twin_with_shifted_context(repo: Repo) -> None:
    """Beta squashed the pull request; canonical's context differs, so that no patch-id is equal."""
    fragment = one_fragment("vllm-two")
    repo.on("main").edit("neighbour", 1, "canonical neighbour")
    repo.edit("change (#2)", 3, "x", files=fragment)
    repo.on("beta").edit("squashed", 3, "x", files=fragment)
    assert land(repo) == {"neighbour": "bring", "change (#2)": "there: fragment"}


def test_a_carried_fragment_alone_is_no_evidence_for_its_code(repo: Repo) -> None:
    fragment = one_fragment("vllm-two")
    repo.on("main").edit("change", 3, "x", files=fragment)
    repo.on("beta").commit("carry the fragment", fragment)
    assert land(repo) == {"change": "bring"}
    same_code(repo)


def test_an_empty_pick_is_there_and_not_a_conflict(repo: Repo) -> None:
    """Squashed with more beside it, context shifted: no trailer, no patch-id, no fragment."""
    repo.on("main").edit("neighbour", 2, "canonical neighbour")
    repo.edit("change", 20, "x")
    repo.on("beta").commit(
        "squash",
        {"code.py": TEXT.replace("line 20\n", "x\n").replace("line 35\n", "y\n"), "new.py": "z\n"},
    )
    assert land(repo) == {"neighbour": "bring", "change": "there: empty pick"}


def test_a_pull_request_squashed_on_beta(repo: Repo) -> None:
    repo.git("switch", "-q", "-c", "pr", "main")
    repo.edit("one", 3, "x")
    repo.edit("two", 4, "y")
    repo.edit("three", 3, "z")
    repo.on("main").edit("own", 30, "main")
    repo.git("merge", "-q", "--no-ff", "-m", "Merge #3", "pr")
    repo.on("beta").commit("squash of #3", {"code.py": TEXT.replace("line 3\nline 4\n", "z\ny\n")})
    decisions = land(repo)
    assert decisions == {
        "own": "bring", "one": "there: patch-id", "two": "there: patch-id", "three": "there: patch-id", "Merge #3": "skip",
    }  # fmt: skip
    same_code(repo)


def test_a_pull_request_squashed_on_canonical(repo: Repo) -> None:
    repo.git("switch", "-q", "-c", "pr", "beta")
    repo.edit("one", 3, "x")
    repo.edit("two", 4, "y")
    repo.on("beta").git("merge", "-q", "--no-ff", "-m", "Merge #3", "pr")
    repo.on("main").commit("squash of #3", {"code.py": TEXT.replace("line 3\nline 4\n", "x\ny\n")})
    assert land(repo) == {"squash of #3": "there: patch-id"}


def test_a_stale_change_that_beta_took_back_does_not_come_back(repo: Repo) -> None:
    """Absorbed in a squash, then taken back on purpose; a plain pick would succeed and bring it again."""
    change = repo.on("main").edit("stale change", 3, "x")
    repo.on("beta").commit(
        "squash", {"code.py": TEXT.replace("line 3\n", "x\n").replace("line 35\n", "y\n")}
    )
    repo.edit("take it back", 3, "line 3")
    repo.git("switch", "-q", "--detach")
    repo.git("cherry-pick", change)  # it would
    repo.git("switch", "-q", "--detach", "main")
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"]) == (0, "nothing-to-do"), told.err
    assert told.decisions() == {"stale change": "there: undone"}
    assert {one["path"]: one["reason"] for one in told.json["tree"]} == {"code.py": "beta-only"}


def test_a_stale_change_inside_a_larger_beta_commit_does_not_come_back(repo: Repo) -> None:
    repo.on("main").edit("stale change", 3, "x")
    newer = TEXT.replace("line 3\n", "better\n")
    repo.on("beta").commit("squash", {"code.py": TEXT.replace("line 3\n", "x\n"), "more.py": "y\n"})
    repo.commit("improve and more", {"code.py": newer, "more.py": "z\n"})
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.decisions() == {"stale change": "there: absorbed"}
    assert repo.file("beta", "code.py") == newer


def test_a_beta_only_revert_of_a_picked_change_stays(repo: Repo) -> None:
    change = repo.on("main").edit("change", 3, "x")
    picked = repo.on("beta").pick(change)
    repo.git("revert", "--no-edit", picked)
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.decisions() == {"change": "there: trailer"}
    assert repo.file("beta", "code.py") == TEXT
    assert [one["reason"] for one in told.json["tree"]] == ["beta-only"]


@pytest.mark.parametrize("kind", ["merged", "fast-forward"])
def test_beta_that_contains_canonical(repo: Repo, kind: str) -> None:
    repo.on("main").edit("change", 3, "x")
    repo.on("beta")
    if kind == "merged":
        repo.edit("own", 30, "beta")
    repo.git("merge", "-q", "--no-edit", "main")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"], told.json["plan"]) == (0, "nothing-to-do", [])


def test_canonical_that_merged_beta(repo: Repo) -> None:
    """A pick from beta that canonical made before it merged beta: beta's commit is behind both lines by then."""
    change = repo.on("beta").edit("change", 3, "x")
    repo.on("main").edit("own", 30, "main")
    repo.pick(change)
    repo.git("merge", "-q", "--no-edit", "beta")
    decisions = land(repo)
    assert decisions == {"own": "bring", "change": "there: trailer", "Merge branch 'beta'": "skip"}
    same_code(repo)
