# SPDX-License-Identifier: Apache-2.0
"""What is brought arrives whole: credits, modes, renames, binary files; what cannot be is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sync.repos import TEXT, Repo, one_fragment


def landed(repo: Repo, *flags: str) -> dict[str, str]:
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land", *flags)
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err
    return told.decisions()


def test_credits_survive(repo: Repo) -> None:
    message = (
        "#12: a subject that starts with the comment sign\n\n# so does this line\n\nBody.\n\n"
        "Co-authored-by: Grace Hopper <grace@users.noreply.github.com>\nSigned-off-by: Ada <ada@example.org>\n"
    )
    change = repo.on("main").edit(message, 3, "x", author="Émile Zola <emile@example.org>")
    landed(repo)
    picked = repo.git("log", "-1", "--format=%H", "beta^")
    assert repo.git("log", "-1", "--format=%an <%ae> %aI", picked) == repo.git(
        "log", "-1", "--format=%an <%ae> %aI", change
    )
    assert repo.git("log", "-1", "--format=%cn", picked) == "Sync Bot"
    assert repo.message(picked) == message + f"(cherry picked from commit {change})"
    record = json.loads(repo.file("beta", "changes/vllm-canonical-sync-20261002.json"))
    assert record["authors"] == ["grace"]
    assert "Also by Ada" not in str(record["details"])
    assert "Also by Émile Zola." in record["details"]


def test_an_empty_message_and_an_empty_commit(repo: Repo) -> None:
    repo.on("main").commit("only a note")
    repo.write({"code.py": TEXT.replace("line 3\n", "x\n")})
    repo.git("commit", "-qa", "--allow-empty-message", "-m", "")
    assert landed(repo) == {"only a note": "skip", "": "bring"}


def test_renames_modes_links_and_binary_files(repo: Repo) -> None:
    repo.on("main").git("mv", "other.py", "moved.py")
    repo.commit("rename")
    (repo.path / "run").write_text("x\n")
    (repo.path / "run").chmod(0o755)
    (repo.path / "link").symlink_to("run")
    repo.commit("new mode and link", {"bin": b"\0\1\r\n\xff"})
    (repo.path / "code.py").chmod(0o755)
    repo.commit("mode only")
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{'2' * 40},module")
    repo.git("commit", "-qm", "submodule")
    repo.on("beta").edit(
        "own", 5, "beta", name="other.py"
    )  # beta edits the file that canonical moves
    assert landed(repo) == {
        "rename": "bring",
        "new mode and link": "bring",
        "mode only": "bring",
        "submodule": "bring",
    }
    tree = dict(reversed(line.split("\t")) for line in repo.git("ls-tree", "beta").splitlines())
    assert "other.py" not in tree
    assert repo.file("beta", "moved.py") == TEXT.replace("line 5\n", "beta\n")
    assert tree["run"].startswith("100755")
    assert tree["link"].startswith("120000")
    assert tree["module"] == f"160000 commit {'2' * 40}"
    assert tree["code.py"].startswith("100755")
    assert repo.blob("beta", "bin") == repo.blob("main", "bin")


def test_kinds_are_named_in_the_plan(repo: Repo) -> None:
    change = repo.on("main").edit("change", 3, "x")
    repo.git("revert", "--no-edit", change)
    repo.git("mv", "other.py", "moved.py")
    (repo.path / "code.py").chmod(0o755)
    repo.commit("move and mode")
    repo.git("switch", "-q", "--detach")
    notes = {
        step["subject"]: " ".join(step["notes"]) for step in repo.sync("--dry-run").json["plan"]
    }
    assert notes['Revert "change"'] == f"reverts {change[:12]} change"
    assert (
        notes["move and mode"] == "renames other.py to moved.py mode of code.py: 100644 to 100755"
    )


def test_canonical_edits_a_file_that_beta_moved(repo: Repo) -> None:
    repo.on("beta").git("mv", "other.py", "beta_name.py")
    repo.commit("[beta] rename")
    repo.on("main").edit("edit", 5, "canonical", name="other.py")
    assert landed(repo) == {"edit": "bring"}
    assert "canonical\n" in repo.file("beta", "beta_name.py")


def test_a_merge_of_plain_branches_brings_its_commits(repo: Repo) -> None:
    repo.git("switch", "-q", "-c", "pr", "main")
    repo.edit("one", 3, "x")
    repo.on("main").edit("own", 30, "main")
    repo.git("merge", "-q", "--no-ff", "-m", "Merge", "pr")
    assert landed(repo) == {"one": "bring", "own": "bring", "Merge": "skip"}
    assert repo.file("beta", "code.py") == repo.file("main", "code.py")


@pytest.mark.parametrize("kind", ["hidden content", "resolved conflict", "ours", "octopus"])
def test_a_merge_with_content_of_its_own_is_refused_by_name(repo: Repo, kind: str) -> None:
    repo.git("switch", "-q", "-c", "pr", "main")
    repo.edit("one", 3, "x")
    repo.git("switch", "-q", "-c", "pr2", "main")
    repo.edit("two", 10, "y", name="other.py")
    repo.on("main").edit("own", 3 if kind == "resolved conflict" else 30, "main")
    if kind == "octopus":
        repo.git("merge", "-q", "--no-ff", "-m", "Octopus", "pr", "pr2")
    elif kind == "ours":
        repo.git("merge", "-q", "-s", "ours", "-m", "Ours", "pr")
    else:
        repo.git("merge", "-q", "--no-commit", "--no-ff", "pr", ok=(0, 1))
        if kind == "resolved conflict":
            repo.write({"code.py": TEXT.replace("line 3\n", "both\n")})
        repo.commit("Evil merge", {"evil.py": "x\n"} if kind == "hidden content" else {})
    repo.git("switch", "-q", "--detach")
    before = repo.snapshot()
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"]) == (3, "refused")
    assert [refusal["code"] for refusal in told.json["refusals"]] == ["merge"]
    assert "cherry-pick -x -m 1" in told.err
    assert repo.snapshot() == before


def test_the_way_out_for_a_merge_works(repo: Repo) -> None:
    repo.git("switch", "-q", "-c", "pr", "main")
    repo.edit("one", 3, "x")
    repo.on("main").git("merge", "-q", "--no-commit", "--no-ff", "pr")
    merge = repo.commit("Merge with more", {"more.py": "x\n"})
    repo.on("beta").pick(merge, "-m", "1")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"]) == (0, "nothing-to-do"), told.err
    assert told.decisions() == {"one": "there: trailer", "Merge with more": "there: trailer"}


def pins(repo: Repo, rule: str = "pins/*.txt") -> Path:
    path = repo.path.parent / "lines.toml"
    path.write_text(f'[sync]\nkeep = [{{ path = "{rule}", why = "the image needs it" }}]\n')
    return path


@pytest.fixture
def pinned(tmp_path: Path) -> Repo:
    """beta pins b12x 1.3.0, canonical moves on to 1.5.0."""
    repo = Repo.create(tmp_path / "repo", {"pins/b12x.txt": "b12x==1.2.0\n"})
    repo.on("beta").commit("[beta] pin", {"pins/b12x.txt": "b12x==1.3.0\n"})
    repo.on("main")
    return repo


def test_version_pins_of_beta_are_kept(pinned: Repo) -> None:
    pinned.commit("pin only", {"pins/b12x.txt": "b12x==1.4.0\n"})
    pinned.edit(
        "pin and code", 3, "x", files={"pins/b12x.txt": "b12x==1.5.0\n", "pins/new.txt": "new==1\n"}
    )
    pinned.edit("code", 4, "y")
    pinned.git("switch", "-q", "--detach")
    told = pinned.sync("--land", "--lines", str(pins(pinned)))
    assert told.code == 0, told.err
    assert told.decisions() == {"pin only": "skip", "pin and code": "bring", "code": "bring"}
    assert pinned.file("beta", "pins/b12x.txt") == "b12x==1.3.0\n"
    assert pinned.git("ls-tree", "beta", "pins/new.txt") == ""
    assert pinned.file("beta", "code.py") == pinned.file("main", "code.py")
    tree = {one["path"]: (one["reason"], one["detail"]) for one in told.json["tree"]}
    assert tree["pins/b12x.txt"] == tree["pins/new.txt"] == ("kept pin", "the image needs it")
    for commit in pinned.git("rev-list", "beta~3..beta").split():  # not even for a moment
        assert pinned.file(commit, "pins/b12x.txt") == "b12x==1.3.0\n"
    record = json.loads(pinned.file("beta", "changes/vllm-canonical-sync-20261002.json"))
    assert "Beta keeps its own version of pins/b12x.txt, pins/new.txt." in record["details"]
    assert pinned.sync("--land", "--lines", str(pins(pinned))).json["outcome"] == "nothing-to-do"


def test_a_pin_that_beta_did_not_touch_is_kept_too(repo: Repo) -> None:
    repo.on("main").commit("base", {"pins/b12x.txt": "b12x==1.3.0\n"})
    repo.git("branch", "-f", "beta", "main")
    repo.edit("pin and code", 3, "x", files={"pins/b12x.txt": None})
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land", "--keep", "pins/b12x.txt")
    assert told.code == 0, told.err
    assert repo.file("beta", "pins/b12x.txt") == "b12x==1.3.0\n"


def test_a_conflict_in_code_beside_a_kept_pin_is_still_a_conflict(pinned: Repo) -> None:
    pinned.edit("pin and code", 3, "x", files={"pins/b12x.txt": "b12x==1.5.0\n"})
    pinned.on("beta").edit("own", 3, "beta")
    pinned.git("switch", "-q", "--detach")
    told = pinned.sync("--land", "--lines", str(pins(pinned)))
    assert told.code == 5
    assert [place["path"] for place in told.json["conflict"]["places"]] == ["code.py"]
    tree = Path(told.json["conflict"]["commands"][0].removeprefix("cd "))
    (tree / "code.py").write_text(TEXT.replace("line 3\n", "beta x\n"))
    pinned.git("-C", str(tree), "add", "code.py")
    told = pinned.sync("--continue")
    assert told.code == 0, told.err
    assert pinned.file("beta", "pins/b12x.txt") == "b12x==1.3.0\n"


def test_a_held_file_that_a_pick_reaches_by_a_rename_is_refused(repo: Repo) -> None:
    repo.on("beta").git("mv", "other.py", "pinned.py")
    repo.commit("[beta] move")
    repo.on("main").edit("edit", 5, "x", name="other.py")
    repo.git("switch", "-q", "--detach")
    before = repo.snapshot()
    told = repo.sync("--land", "--keep", "pinned.py")
    assert (told.code, told.json["error"]["reason"]) == (3, "held")
    assert repo.snapshot() == before


@pytest.mark.parametrize("change", ["edit", "re-indent", "delete", "rename"])
def test_a_published_fragment_is_never_touched(repo: Repo, change: str) -> None:
    repo.on("main").commit("base", one_fragment("vllm-two"))
    repo.git("branch", "-f", "beta", "main")
    path = repo.path / "changes" / "vllm-two.json"
    if change == "delete":
        path.unlink()
    elif change == "rename":
        path.rename(path.with_name("vllm-three.json"))
    elif change == "edit":
        path.write_text(path.read_text().replace("works", "fails"))
    else:
        path.write_text(json.dumps(json.loads(path.read_text())))
    commit = repo.edit("touch it", 3, "x")
    repo.git("switch", "-q", "--detach")
    before = repo.snapshot()
    told = repo.sync("--land")
    assert (told.code, told.json["outcome"]) == (3, "refused")
    (refusal,) = told.json["refusals"]
    assert (refusal["code"], refusal["commit"]) == ("published-fragment", commit)
    assert repo.blob("beta", "changes/vllm-two.json") in refusal["what"]
    if change in ("edit", "re-indent"):
        assert repo.blob("main", "changes/vllm-two.json") in refusal["what"]
    assert "new fragment" in refusal["way_out"]
    assert repo.snapshot() == before


def test_a_fragment_edited_on_one_side_only_is_refused_even_for_a_twin(repo: Repo) -> None:
    change = repo.on("beta").edit("change", 3, "x", files=one_fragment("vllm-two"))
    repo.on("main").git("cherry-pick", "-x", "--no-commit", change)
    repo.write(one_fragment("vllm-two", summary="Other words."))
    repo.commit(f"change\n\n(cherry picked from commit {change})")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.json["refusals"][0]["code"] == "published-fragment"


def test_the_way_out_for_an_edited_fragment_works(repo: Repo) -> None:
    repo.on("main").commit("base", one_fragment("vllm-two"))
    repo.git("branch", "-f", "beta", "main")
    repo.commit("edit", one_fragment("vllm-two", summary="Other words."))
    repo.commit("put it back", one_fragment("vllm-two"))
    repo.commit("correct", one_fragment("vllm-two-correction", requires=["vllm-two"]))
    decisions = landed(repo)
    assert decisions["correct"] == "bring"
    assert repo.blob("beta", "changes/vllm-two.json") == repo.blob("main", "changes/vllm-two.json")


def test_with_a_receipt_only_what_was_released_is_fixed(repo: Repo) -> None:
    files = one_fragment("vllm-two") | one_fragment("vllm-three")
    repo.on("main").commit("base", files)
    receipt = {
        "schema": "b12x-overlay-release-receipt/v1", "release": "beta-1", "published_at": "2026-10-01T00:00:00Z",
        "commit": "", "fragments": {"vllm-two": repo.blob("HEAD", "changes/vllm-two.json")},
    }  # fmt: skip
    repo.commit("release", {".ci/releases/beta-1.json": json.dumps(receipt)})
    repo.git("branch", "-f", "beta", "main")
    repo.commit("correct before its release", one_fragment("vllm-three", summary="Better words."))
    assert landed(repo) == {"correct before its release": "bring"}
    repo.on("main").commit("edit a released one", one_fragment("vllm-two", summary="Better words."))
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert told.json["refusals"][0]["code"] == "published-fragment"


def test_faulty_fragments_stop_the_sync(repo: Repo) -> None:
    repo.on("main").commit("faulty", one_fragment("vllm-two", models=[]))
    repo.git("switch", "-q", "--detach")
    before = repo.snapshot()
    told = repo.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "fragments")
    assert "vllm-two.json: $.models" in told.err
    assert repo.snapshot() == before


def test_the_patch_series_is_applied_by_the_synced_trees_own_command(repo: Repo) -> None:
    """A stand-in command: it must run in the synced tree, and its failure must stop the sync."""
    command = "import pathlib, sys\nsys.exit('no hunk' if 'bad' in pathlib.Path('patches/a.patch').read_text() else 0)\n"
    patchset = '[[patch]]\nname = "a"\nfragments = ["vllm-two"]\n'
    repo.on("main").commit(
        "series",
        {
            "patches/patchset.toml": patchset, "patches/a.patch": "good\n", "scripts/apply-patches": command,
            **one_fragment("vllm-two"),
        },
    )  # fmt: skip
    landed(repo)
    repo.on("main").commit("bad series", {"patches/a.patch": "bad\n"})
    repo.git("switch", "-q", "--detach")
    before = repo.snapshot()
    told = repo.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "patches")
    assert "no hunk" in told.err
    assert repo.snapshot() == before
    repo.on("main").commit(
        "no command", {"patches/a.patch": "good\n", "scripts/apply-patches": None}
    )
    repo.git("switch", "-q", "--detach")
    assert repo.sync("--land").json["error"]["reason"] == "patches"


def test_a_patch_without_its_fragment_stops_the_sync(repo: Repo) -> None:
    patchset = '[[patch]]\nname = "a"\nfragments = ["vllm-nowhere"]\n'
    repo.on("main").commit(
        "series", {"patches/patchset.toml": patchset, **one_fragment("vllm-two")}
    )
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert "vllm-nowhere" in told.err
    assert told.code == 3


def test_one_record_a_run_with_suffixes(repo: Repo) -> None:
    for number, name in enumerate(("20261002", "20261002b", "20261002c")):
        repo.on("main").edit(f"change {number}", 3 + number, "x")
        repo.git("switch", "-q", "--detach")
        told = repo.sync("--land")
        assert told.json["fragment"] == f"vllm-canonical-sync-{name}"
        assert repo.git("cat-file", "-t", f"beta:changes/vllm-canonical-sync-{name}.json") == "blob"
    assert repo.sync("--land").json["fragment"] is None
    assert len(repo.git("ls-tree", "--name-only", "beta", "changes/").split()) == 3


def test_the_record_needs_a_known_author_or_a_configured_one(repo: Repo) -> None:
    repo.on("main").edit("change", 3, "x", author="Nobody <nobody@example.org>")
    repo.git("switch", "-q", "--detach")
    told = repo.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "authors")
    told = repo.sync("--land", "--author", "octocat")
    assert told.code == 0, told.err
    record = json.loads(repo.file("beta", "changes/vllm-canonical-sync-20261002.json"))
    assert record["authors"] == ["octocat"]
    assert "Also by Nobody." in record["details"]


def test_a_fork_checkout_with_its_own_folder(repo: Repo) -> None:
    fragment = {
        name.replace("changes/", ".lil/changes/"): data
        for name, data in one_fragment("vllm-two").items()
    }
    repo.on("main").edit("change", 3, "x", files=fragment)
    landed(repo, "--folder", ".lil/changes")
    assert repo.git("ls-tree", "--name-only", "beta", ".lil/changes/").split() == [
        ".lil/changes/vllm-canonical-sync-20261002.json",
        ".lil/changes/vllm-two.json",
    ]
