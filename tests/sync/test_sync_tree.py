# SPDX-License-Identifier: Apache-2.0
"""The tree report explains each difference or fails: a twin that differs cannot hide."""

from __future__ import annotations

import pytest
from sync.repos import TEXT, Repo


def refused(repo: Repo) -> list[str]:
    repo.git("switch", "-q", "--detach")
    before = repo.snapshot()
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"]) == (3, "refused"), told.err
    assert told.json["error"]["reason"] == "tree"
    assert repo.snapshot() == before
    return [one["path"] for one in told.json["tree"] if one["reason"] == "unexplained"]


def twin(repo: Repo, **files: str | None) -> None:
    """A change on canonical, and on beta one that says it is its pick but differs in *files*."""
    change = repo.on("main").commit(
        "change", {"code.py": TEXT.replace("line 3\n", "x\n"), "other.py": TEXT + "more\n"}
    )
    own = {"code.py": TEXT.replace("line 3\n", "x\n"), "other.py": TEXT + "more\n"}
    own |= {name.replace("_py", ".py"): content for name, content in files.items()}
    repo.on("beta").commit(f"change\n\n(cherry picked from commit {change})", own)


def test_a_twin_that_is_equal_is_fine(repo: Repo) -> None:
    twin(repo)
    repo.git("switch", "-q", "--detach")
    assert repo.sync("--land").json["tree"] == []


@pytest.mark.parametrize(
    "files",
    [
        {"code_py": TEXT.replace("line 3\n", "x2\n")},
        {"code_py": TEXT},  # the change is missing
        {"extra_py": "smuggled\n"},
        {"other_py": None},
        {"other_py": TEXT + "  more\n"},  # indentation
    ],
)
def test_a_twin_that_differs_is_unexplained(repo: Repo, files: dict[str, str | None]) -> None:
    twin(repo, **files)
    assert refused(repo) == [next(iter(files)).replace("_py", ".py")]


def test_a_beta_only_edit_in_the_same_file_does_not_hide_it(repo: Repo) -> None:
    twin(repo, code_py=TEXT.replace("line 3\n", "smuggled\n"))
    repo.edit("[beta] honest", 30, "beta only")
    assert refused(repo) == ["code.py"]


def test_a_resolution_of_an_earlier_pick_excuses_nothing(repo: Repo) -> None:
    """canonical's own commit came by a resolved pick; its pick on beta was not resolved by hand, but differs."""
    message = f"change\n\n(cherry picked from commit {'1' * 40})\nSync-Resolved-By-Hand: code.py"
    change = repo.on("main").commit(message, {"code.py": TEXT.replace("line 3\n", "x\n")})
    smuggled = {"code.py": TEXT.replace("line 3\n", "smuggled\n")}
    repo.on("beta").commit(f"{message}\n(cherry picked from commit {change})", smuggled)
    assert refused(repo) == ["code.py"]


def test_a_mode_that_differs_is_unexplained_beside_a_beta_only_edit(repo: Repo) -> None:
    change = repo.on("main").edit("change", 3, "x")
    repo.on("beta").git("cherry-pick", "--no-commit", change)
    (repo.path / "code.py").chmod(0o755)
    repo.commit(f"change\n\n(cherry picked from commit {change})")
    repo.edit("[beta] honest", 30, "beta only")
    assert refused(repo) == ["code.py"]


def test_binary_files_need_a_beta_only_commit_with_these_bytes(repo: Repo) -> None:
    change = repo.on("main").commit("change", {"bin": b"\0a"})
    repo.on("beta").commit("[beta] early", {"bin": b"\0z"})
    repo.commit(f"change\n\n(cherry picked from commit {change})", {"bin": b"\0b"})
    assert refused(repo) == ["bin"]


def test_a_file_that_a_twin_forgot_to_delete(repo: Repo) -> None:
    change = repo.on("main").commit(
        "drop", {"other.py": None, "code.py": TEXT.replace("line 3\n", "x\n")}
    )
    repo.on("beta").edit("[beta] honest", 30, "beta only", name="other.py")
    repo.commit(
        f"drop\n\n(cherry picked from commit {change})",
        {"code.py": TEXT.replace("line 3\n", "x\n")},
    )
    assert refused(repo) == ["other.py"]


def test_an_evil_beta_merge_is_betas_own_doing(repo: Repo) -> None:
    """Beta may do as it likes; the report says which commit did it."""
    repo.git("switch", "-q", "-c", "pr", "beta")
    repo.edit("one", 20, "x")
    repo.on("beta").git("merge", "-q", "--no-ff", "--no-commit", "pr")
    merge = repo.edit("Merge with more", 30, "merged more")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.code == 0, told.err
    (row,) = told.json["tree"]
    assert row["reason"] == "beta-only"
    assert merge[:12] in row["detail"]


def test_beta_only_deletions_additions_renames_and_modes_are_explained(repo: Repo) -> None:
    repo.on("main").commit(
        "base", {"gone.py": "a\n", "bin": b"\0a", "mode.sh": "x\n", "long.py": TEXT}
    )
    repo.git("branch", "-f", "beta", "main")
    repo.edit("canonical goes on", 3, "x")
    repo.edit("in the moved file too", 5, "canonical", name="long.py")
    repo.on("beta").commit(
        "[beta] delete, add", {"gone.py": None, "added.py": "b\n", "bin": b"\0b"}
    )
    repo.edit("[beta] edit, then move", 30, "beta", name="long.py")
    repo.git("mv", "long.py", "moved.py")
    (repo.path / "mode.sh").chmod(0o755)
    repo.commit("[beta] move and mode")
    repo.edit("[beta] change twice", 20, "first")
    repo.edit("[beta] change twice", 20, "second")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.code == 0, told.err
    assert {one["path"]: one["reason"] for one in told.json["tree"]} == dict.fromkeys(
        [
            "added.py",
            "bin",
            "changes/vllm-canonical-sync-20261002.json",
            "code.py",
            "gone.py",
            "mode.sh",
            "moved.py",
        ],
        "beta-only",
    )


def test_odd_names_and_bytes(repo: Repo) -> None:
    """Names with blanks, quotes and other scripts, latin-1 and U+2028 in the text."""
    odd = 'sub dir/a "b" ü\u2028.py'
    repo.on("main").commit("base", {odd: b"caf\xe9\r\nx\xe2\x80\xa8y\n"})
    repo.git("branch", "-f", "beta", "main")
    repo.edit("canonical", 3, "x")
    repo.on("beta").commit("[beta] odd", {"a/b.py": "x\n", odd: b"caf\xe9s\r\nx\xe2\x80\xa8z\n"})
    repo.git("mv", "other.py", "a/other.py")
    repo.commit("[beta] into a folder named like a diff's prefix")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.code == 0, told.err
    reasons = {one["path"]: one["reason"] for one in told.json["tree"]}
    assert reasons[odd] == reasons["a/other.py"] == "beta-only"
