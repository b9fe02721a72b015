# SPDX-License-Identifier: Apache-2.0
"""One ref moves, once, from where it was; or one branch is pushed with lease. Otherwise nothing changes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from sync.repos import TEXT, Repo, one_fragment


@pytest.fixture
def ahead(repo: Repo) -> Repo:
    """canonical has one change that beta lacks."""
    repo.on("main").edit("change", 3, "x")
    repo.git("switch", "-q", "--detach")
    return repo


@pytest.fixture
def clone(ahead: Repo, tmp_path: Path) -> Repo:
    """A clone with local branches, as somebody's checkout; its remote is *ahead*, seen as ``origin.path``."""
    ahead.git("clone", "-q", str(ahead.path), str(tmp_path / "clone"))
    made = Repo(tmp_path / "clone", ahead.env)
    made.git("switch", "-q", "--detach", "origin/beta")
    made.git("branch", "-qf", "--track", "beta", "origin/beta")
    made.git("branch", "-qf", "--track", "main", "origin/main")
    return made


def test_beta_moves_once_from_its_old_value(ahead: Repo) -> None:
    old = ahead.tip("beta")
    before = ahead.snapshot()
    told = ahead.sync("--land")
    assert (told.code, told.json["landed"]) == (0, "beta"), told.err
    reflog = ahead.git("reflog", "show", "--format=%H %gs", "beta").splitlines()
    assert reflog[0] == f"{told.json['result']} sync-beta: main {ahead.tip('main')[:12]}"
    assert reflog[1].startswith(old)
    assert before[1:] == ahead.snapshot()[1:]
    assert ahead.tip("beta") == told.json["result"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [((), 0), (("--detailed-exit-code",), 10)],
)
def test_exit_codes_of_success(ahead: Repo, flags: tuple[str, ...], code: int) -> None:
    assert ahead.sync("--dry-run", *flags).code == 1
    assert ahead.sync("--land", *flags).code == code
    assert ahead.sync("--land", *flags).code == 0
    assert ahead.sync("--dry-run", *flags).code == 0


def whole(folder: Path) -> dict[str, bytes]:
    """Every file below *folder*, links and times aside."""
    return {
        str(path.relative_to(folder)): b"" if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def test_a_dry_run_writes_nothing_at_all(clone: Repo, tmp_path: Path) -> None:
    Repo(tmp_path / "repo", clone.env).on("main").edit("only at the remote", 9, "y")
    before = whole(clone.path)
    told = clone.sync("--dry-run")
    assert (told.code, told.json["outcome"]) == (1, "would-sync"), told.err
    assert "only at the remote" in told.decisions()
    assert whole(clone.path) == before
    assert clone.sync("--dry-run", "--push").code == 1
    assert whole(clone.path) == before


@pytest.mark.parametrize("where", ["main work tree", "linked work tree", "rebase", "bisect"])
def test_a_beta_in_use_is_refused(ahead: Repo, where: str, tmp_path: Path) -> None:
    if where == "main work tree":
        ahead.on("beta")
    elif where == "linked work tree":
        ahead.git("worktree", "add", "-q", str(tmp_path / "linked"), "beta")
    elif where == "rebase":
        ahead.on("beta").edit("own", 3, "clash")
        ahead.git("rebase", "main", ok=(1,))
    else:
        ahead.on("beta").edit("own", 30, "y")
        ahead.git("bisect", "start", "-q")
        ahead.git("bisect", "bad")
        ahead.git("switch", "-q", "--detach", "--ignore-other-worktrees", "main")
    before = ahead.snapshot()
    told = ahead.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "checked-out"), told.err
    assert ahead.snapshot() == before


def test_the_users_work_is_not_touched(ahead: Repo) -> None:
    """Staged, unstaged, untracked and stashed work in the work tree stays as it is."""
    ahead.write({"staged.py": "a\n", "code.py": "dirty\n", "untracked.py": "b\n"})
    ahead.git("add", "staged.py")
    before = ahead.snapshot()
    assert ahead.sync("--land").code == 0
    assert ahead.snapshot()[1:] == before[1:]
    assert (ahead.path / "code.py").read_text() == "dirty\n"


def hook(repo: Repo, move: str, at: str) -> dict[str, str]:
    """Put a git on PATH that runs *move* once, just before the first command whose arguments hold *at*."""
    folder = repo.path.parent / "bin"
    folder.mkdir(exist_ok=True)
    real = next(
        path for one in os.environ["PATH"].split(":") if (path := Path(one) / "git").exists()
    )
    done = folder / "done"
    done.unlink(missing_ok=True)
    script = folder / "git"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *"{at}"*) [ -e {done} ] || {{ touch {done}; ( unset GIT_CONFIG_COUNT; {move} ); }};; esac\n'
        f'exec {real} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("branch", ["beta", "main"])
@pytest.mark.parametrize("at", ["cherry-pick", "diff-tree -r -z --raw -M", "update-ref -m"])
def test_a_tip_that_moves_during_the_run_stops_it(ahead: Repo, branch: str, at: str) -> None:
    ahead.on(branch).edit("meanwhile", 20, "y")
    new = ahead.tip(branch)
    ahead.git("switch", "-q", "--detach")
    ahead.git("branch", "-qf", branch, f"{branch}^")
    refs = {name: ahead.tip(name) for name in ("main", "beta")} | {branch: new}
    told = ahead.sync(
        "--land", env=hook(ahead, f"git -C {ahead.path} branch -qf {branch} {new}", at)
    )
    assert (told.code, told.json["error"]["reason"]) == (3, "moved"), told.err
    assert {name: ahead.tip(name) for name in ("main", "beta")} == refs
    assert len(ahead.git("worktree", "list").splitlines()) == 1
    assert ahead.sync("--land").code == 0


def test_the_remotes_tips_are_fetched_first(clone: Repo, tmp_path: Path) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    remote.on("main").edit("only at the remote", 9, "y")
    remote.git("switch", "-q", "--detach")
    tracking = clone.tip("origin/main")
    told = clone.sync("--land")
    assert told.code == 0, told.err
    assert "only at the remote" in clone.subjects("origin/beta..beta")
    assert clone.tip("origin/main") == tracking  # the user's view of the remote is the user's


def test_a_remote_that_moves_during_the_run_stops_it(clone: Repo, tmp_path: Path) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    remote.on("beta").edit("meanwhile", 20, "y")
    new = remote.tip("beta")
    remote.git("switch", "-q", "--detach")
    remote.git("branch", "-qf", "beta", "beta^")
    before = clone.snapshot()
    for mode in ("--land", "--push"):
        remote.git("branch", "-qf", "beta", f"{new}^")
        told = clone.sync(
            mode, env=hook(clone, f"git -C {remote.path} branch -qf beta {new}", "cherry-pick")
        )
        assert (told.code, told.json["error"]["reason"]) == (3, "moved"), told.err
        assert clone.snapshot() == before
        assert remote.git("branch", "--list", "sync/*") == ""


@pytest.mark.parametrize("how", ["behind", "diverged"])
def test_a_local_beta_that_lacks_the_remotes_work_is_refused(
    clone: Repo, tmp_path: Path, how: str
) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    remote.on("beta").edit("at the remote", 20, "y")
    remote.git("switch", "-q", "--detach")
    if how == "diverged":
        clone.on("beta").edit("local", 30, "z")
        clone.git("switch", "-q", "--detach")
    told = clone.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "behind"), told.err
    assert "fetch origin" in told.err
    assert clone.sync("--push").code == 0  # which looks at the remote's beta only


def test_a_local_beta_ahead_of_the_remote_may_land(clone: Repo) -> None:
    clone.on("beta").edit("not pushed yet", 30, "z")
    clone.git("switch", "-q", "--detach")
    assert clone.sync("--land").code == 0


def test_a_remote_that_cannot_be_read_is_no_success(clone: Repo) -> None:
    clone.git("remote", "set-url", "origin", str(clone.path.parent / "gone"))
    before = clone.snapshot()
    told = clone.sync("--land")
    assert (told.code, told.json["outcome"]) == (4, "failed")
    assert "unknown" in told.err
    assert clone.snapshot() == before
    assert clone.sync("--land", "--no-remote").code == 0


def test_push_makes_one_branch_and_updates_it(clone: Repo, tmp_path: Path) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    before = clone.snapshot()
    told = clone.sync("--push")
    assert (told.code, told.json["landed"]) == (0, "origin/sync/canonical-to-beta"), told.err
    clone.git(
        "update-ref", "-d", "refs/remotes/origin/sync/canonical-to-beta"
    )  # git's own note of the push
    assert clone.snapshot() == before
    assert remote.tip("sync/canonical-to-beta") == told.json["result"]
    assert remote.tip("beta") == clone.tip("beta")

    told = clone.sync("--push")  # the pull request is open, nothing new: no push, no noise
    assert (told.code, told.json["outcome"]) == (0, "nothing-to-do"), told.err
    first = remote.tip("sync/canonical-to-beta")

    remote.on("main").edit("one more", 12, "z")
    remote.git("switch", "-q", "--detach")
    told = clone.sync("--push", env={"SOURCE_DATE_EPOCH": "1791028800"})  # the next day
    assert (told.code, told.json["outcome"]) == (0, "synced"), told.err
    assert (
        remote.git("merge-base", first, "sync/canonical-to-beta") == first
    )  # on top, so that reviews stay
    records = remote.git("ls-tree", "--name-only", "sync/canonical-to-beta", "changes/").split()
    assert records == ["changes/vllm-canonical-sync-20261003.json"]
    summary = json.loads(remote.file("sync/canonical-to-beta", records[0]))["summary"]
    assert "2 canonical changes" in summary


def test_push_keeps_what_people_added_to_the_branch(clone: Repo, tmp_path: Path) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    assert clone.sync("--push").code == 0
    remote.on("sync/canonical-to-beta").edit("reviewer's fix", 38, "fixed")
    remote.on("main").edit("one more", 12, "z")
    remote.git("switch", "-q", "--detach")
    assert clone.sync("--push").code == 0
    assert "reviewer's fix" in remote.subjects("beta..sync/canonical-to-beta")

    remote.on("beta").edit("beta moved", 30, "y")  # now the branch has to be made anew
    remote.git("switch", "-q", "--detach")
    tip = remote.tip("sync/canonical-to-beta")
    told = clone.sync("--push")
    assert (told.code, told.json["error"]["reason"]) == (3, "work-branch"), told.err
    assert "reviewer's fix" in told.err
    assert remote.tip("sync/canonical-to-beta") == tip


def test_push_makes_the_branch_anew_when_beta_moved(clone: Repo, tmp_path: Path) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    assert clone.sync("--push").code == 0
    remote.on("beta").edit("beta moved", 30, "y")
    remote.git("switch", "-q", "--detach")
    assert clone.sync("--push").code == 0
    assert remote.subjects("beta..sync/canonical-to-beta") == [
        "change",
        "Record the canonical sync 20261002",
    ]


def test_push_lease(clone: Repo, tmp_path: Path) -> None:
    """Somebody pushes to the work branch between the last look and the push."""
    remote = Repo(tmp_path / "repo", clone.env)
    move = f"git -C {remote.path} branch -f sync/canonical-to-beta main"
    told = clone.sync("--push", env=hook(clone, move, "push --porcelain"))
    assert (told.code, told.json["error"]["reason"]) == (3, "moved"), told.err
    assert remote.tip("sync/canonical-to-beta") == remote.tip("main")


def test_a_merged_pull_request_leaves_nothing_to_do(clone: Repo, tmp_path: Path) -> None:
    remote = Repo(tmp_path / "repo", clone.env)
    assert clone.sync("--push").code == 0
    remote.git("branch", "-f", "beta", "sync/canonical-to-beta")
    assert clone.sync("--push").json["outcome"] == "nothing-to-do"
    remote.git("branch", "-D", "sync/canonical-to-beta")
    assert clone.sync("--push").json["outcome"] == "nothing-to-do"


def test_ambient_state_changes_nothing(ahead: Repo, tmp_path: Path) -> None:
    """Hooks, signing, other repositories' variables, diff and merge settings of the user."""
    (ahead.path / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (ahead.path / ".git" / "hooks" / "commit-msg").write_text("#!/bin/sh\necho hooked > $1\n")
    for name in ("pre-commit", "commit-msg"):
        (ahead.path / ".git" / "hooks" / name).chmod(0o755)
    settings = tmp_path / "config"
    settings.write_text(
        "[core]\n autocrlf = true\n abbrev = 5\n hooksPath = .git/hooks\n[commit]\n gpgsign = true\n cleanup = strip\n"
        "[diff]\n algorithm = patience\n noprefix = true\n context = 0\n external = false\n[color]\n ui = always\n"
        "[merge]\n conflictStyle = zdiff3\n renames = false\n[rerere]\n enabled = true\n autoUpdate = true\n"
        "[log]\n showSignature = true\n decorate = full\n[apply]\n whitespace = fix\n[user]\n name = x\n email = y\n"
    )
    expected = ahead.sync("--dry-run").json["plan"]
    told = ahead.sync(
        "--land",
        env={
            "GIT_CONFIG_GLOBAL": str(settings), "GIT_DIR": "/nowhere", "GIT_INDEX_FILE": "/nowhere/index",
            "GIT_WORK_TREE": "/nowhere", "GIT_AUTHOR_NAME": "Somebody Else", "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "core.autocrlf", "GIT_CONFIG_VALUE_0": "true", "GIT_EXTERNAL_DIFF": "/bin/false",
        },
    )  # fmt: skip
    assert told.code == 0, told.err
    assert [(step["commit"], step["decision"]) for step in told.json["plan"]] == [
        (step["commit"], step["decision"]) for step in expected
    ]
    assert ahead.message("beta^").startswith("change\n\n(cherry picked")
    assert ahead.git("log", "-1", "--format=%an", "beta^") == "Ada Lovelace"
    assert ahead.git("diff", "main", "beta", "--", "code.py") == ""


def test_shallow_and_unrelated(ahead: Repo, tmp_path: Path) -> None:
    ahead.git(
        "clone",
        "-q",
        "--depth=1",
        "--no-single-branch",
        f"file://{ahead.path}",
        str(tmp_path / "shallow"),
    )
    told = Repo(tmp_path / "shallow", ahead.env).sync("--push")
    assert (told.code, told.json["error"]["reason"]) == (3, "shallow")
    assert "--unshallow" in told.err
    ahead.git("switch", "-q", "--orphan", "other")
    ahead.commit("start", {"a": "b\n"})
    told = ahead.sync("--land", canonical="other")
    assert (told.code, told.json["error"]["reason"]) == (3, "unrelated")


def test_no_identity(ahead: Repo) -> None:
    told = ahead.sync("--land", env={"GIT_COMMITTER_NAME": "", "GIT_COMMITTER_EMAIL": ""})
    assert (told.code, told.json["error"]["reason"]) == (3, "identity")


@pytest.mark.parametrize("name", ["tag", "commit", "remote branch"])
def test_other_forms_of_canonical(clone: Repo, name: str) -> None:
    clone.git("tag", "v1", "main")
    given = {"tag": "v1", "commit": clone.tip("main")[:10], "remote branch": "origin/main"}[name]
    assert clone.sync("--land", canonical=given).code == 0


def test_a_bare_repository(ahead: Repo, tmp_path: Path) -> None:
    ahead.git("clone", "-q", "--bare", str(ahead.path), str(tmp_path / "bare.git"))
    bare = Repo(tmp_path / "bare.git", ahead.env)
    bare.git("remote", "remove", "origin")
    told = bare.sync("--land")
    assert told.code == 0, told.err
    assert bare.subjects("main^..beta") == ["change", "Record the canonical sync 20261002"]


def test_from_a_subfolder_and_a_linked_work_tree(ahead: Repo, tmp_path: Path) -> None:
    ahead.git("worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    assert Repo(tmp_path / "linked", ahead.env).sync("--land").code == 0
    ahead.git("branch", "-f", "beta", "main^")
    (ahead.path / "sub").mkdir()
    assert Repo(ahead.path / "sub", ahead.env).sync("--land").code == 0
    assert ahead.file("beta", "code.py") == TEXT.replace("line 3\n", "x\n")


def test_a_branch_of_the_runs_name_is_not_taken(ahead: Repo) -> None:
    ahead.git("branch", "sync-canonical-to-beta-run", "main")
    told = ahead.sync("--land")
    assert (told.code, told.json["error"]["reason"]) == (3, "branch")
    assert ahead.tip("sync-canonical-to-beta-run") == ahead.tip("main")
    ahead.git("branch", "-m", "sync-canonical-to-beta-run", "sync")  # which is in no way
    assert ahead.sync("--land").code == 0


def test_the_lines_file_names_the_lines(ahead: Repo) -> None:
    lines = '[lines]\ncanonical = "main"\nbeta = "beta"\n[sync]\nhandles = {"ada@example.org" = "ada"}\n'
    ahead.write({".ci/lines.toml": lines})
    told = ahead.sync("--dry-run", canonical="main", beta="beta")
    assert told.code == 1
    ahead.write({".ci/lines.toml": "[lines]\nbeta = 3\n"})
    told = ahead.sync("--dry-run")
    assert told.code == 2
    assert "lines.toml" in told.err


def test_a_record_that_a_receipt_fixed_is_left_alone(ahead: Repo) -> None:
    assert ahead.sync("--land").code == 0
    ahead.on("main").commit("twin of the record", one_fragment("vllm-canonical-sync-20261002"))
    ahead.git("switch", "-q", "--detach")
    told = ahead.sync("--land")
    assert told.json["refusals"][0]["code"] == "published-fragment"
