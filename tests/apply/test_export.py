# SPDX-License-Identifier: Apache-2.0
"""Git checkouts: apply --commit, export back to byte-identical files, what export refuses (trap 24)."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from apply.conftest import A
from apply.factory import REPO, Project, Series, contents, lay, place, snapshot
from b12x_overlay.patching import patchset
from support import paths as places

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

IDENTITY = {"GIT_CONFIG_NOSYSTEM": "1"}
CONFIG = "[user]\n\tname = Tester\n\temail = t@example.invalid\n[init]\n\tdefaultBranch = main\n"


def git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git identity, and nothing of this machine's configuration."""
    config = place(tmp_path, "gitconfig", CONFIG.encode())
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def made(made: Project, build: Path, identity: None, tmp_path: Path) -> Project:
    made.env |= {
        "B12X_OVERLAY_BUILD": str(build),
        "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"),
        **IDENTITY,
    }
    return made


@pytest.fixture
def checkout(tree: Path, identity: None) -> Path:
    """The original tree as a git checkout."""
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "vLLM")
    return tree


@pytest.fixture
def exported(made: Project, checkout: Path) -> Path:
    """A checkout with one commit per patch, and patches/ in the form that export writes."""
    assert made.run("--target", checkout, "--commit").code == 0
    result = made.run("export", "--target", checkout)
    assert result.code == 0, result.text
    return checkout


def files(made: Project) -> dict[str, bytes]:
    return contents(made.root / "patches") | contents(made.root / "overlay")


def amend(checkout: Path, path: str, old: bytes, new: bytes) -> None:
    """Change *path* in the last commit."""
    data = (checkout / path).read_bytes()
    assert old in data
    place(checkout, path, data.replace(old, new))
    git(checkout, "add", path)
    git(checkout, "commit", "--quiet", "--amend", "--no-edit")


class TestCommit:
    """apply --commit."""

    def test_one_commit_per_patch(self, made: Project, checkout: Path, series: Series) -> None:
        document = made.json("--target", checkout, "--commit")
        assert document["exit"] == 0
        assert git(checkout, "log", "--format=%s|%an|%cn").splitlines() == [
            "second|A|Tester", "first|A|Tester", "vLLM|Tester|Tester",
        ]  # fmt: skip
        assert git(checkout, "status", "--porcelain") == ""
        assert git(checkout, "show", "--name-only", "--format=", "HEAD^").splitlines() == [
            "vllm/a.py"
        ]
        for path, data in series.final().items():
            assert (checkout / path).read_bytes() == data
        assert made.run("status", "--target", checkout).code == 0
        head = git(checkout, "rev-parse", "HEAD")
        assert made.json("--target", checkout, "--commit")["outcome"] == "already applied"
        assert git(checkout, "rev-parse", "HEAD") == head

    def test_an_applied_tree_only_gets_the_commits(self, made: Project, checkout: Path) -> None:
        made.run("--target", checkout)
        assert made.run("--target", checkout, "--commit").code == 0
        assert git(checkout, "status", "--porcelain") == ""
        assert len(git(checkout, "log", "--oneline").splitlines()) == 3

    def test_a_dry_run_makes_nothing(self, made: Project, checkout: Path) -> None:
        before = snapshot(checkout)
        assert made.run("--target", checkout, "--commit", "--dry-run").code == 1
        assert {key: value for key, value in snapshot(checkout).items() if ".git/" not in key} == {
            key: value for key, value in before.items() if ".git/" not in key
        }
        assert len(git(checkout, "log", "--oneline").splitlines()) == 1

    def test_staged_changes_are_not_swept_into_a_patch(self, made: Project, checkout: Path) -> None:
        place(checkout, "mine.txt", b"mine\n")
        git(checkout, "add", "mine.txt")
        result = made.run("--target", checkout, "--commit")
        assert result.code == 3
        assert "staged" in result.err
        assert len(git(checkout, "log", "--oneline").splitlines()) == 1

    def test_other_edits_stay_out_and_stay_there(self, made: Project, checkout: Path) -> None:
        place(checkout, "vllm/__init__.py", b"# mine\n")
        assert made.run("--target", checkout, "--commit").code == 0
        assert git(checkout, "status", "--porcelain").split() == ["M", "vllm/__init__.py"]

    def test_no_checkout(self, made: Project, tree: Path) -> None:
        git(tree.parent, "init", "--quiet")  # a repository further up is not the target's
        result = made.run("--target", tree, "--commit")
        assert result.code == 3
        assert "not the top folder of a git checkout" in result.err

    def test_an_older_head_is_refused(self, made: Project, checkout: Path) -> None:
        place(checkout, "vllm/a.py", A + b"# 0.32\n")
        git(checkout, "commit", "--quiet", "--all", "--message", "other")
        before = git(checkout, "rev-parse", "HEAD")
        assert made.run("--target", checkout, "--commit").code == 3
        assert git(checkout, "rev-parse", "HEAD") == before
        assert (checkout / "vllm/a.py").read_bytes() == A + b"# 0.32\n"

    def test_the_series_also_goes_in_with_git_am(
        self, made: Project, exported: Path, tmp_path: Path, series: Series
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


class TestExport:
    """export."""

    def test_a_round_trip_changes_no_byte(self, made: Project, exported: Path) -> None:
        before = files(made)
        document = made.json("export", "--target", exported)
        assert (document["exit"], document["outcome"], document["changed"]) == (0, "unchanged", [])
        assert files(made) == before
        clone = exported.with_name("clone")
        git(exported.parent, "clone", "--quiet", "--branch", "main", str(exported), str(clone))
        git(clone, "reset", "--quiet", "--hard", "HEAD~2")
        assert made.run("--target", clone, "--commit").code == 0
        assert made.json("export", "--target", clone)["outcome"] == "unchanged"

    @pytest.mark.parametrize(
        "subject", ["[perf] x", "[PATCH] y: z", "Re: [RFC] caf\u00e9 \u2028 w"]
    )
    def test_trap_24_bracketed_subjects_survive(
        self, made: Project, exported: Path, subject: str
    ) -> None:
        git(
            exported,
            "commit",
            "--quiet",
            "--amend",
            "--message",
            f"{subject}\n\nbody\n\nPatch: second",
        )
        assert made.run("export", "--target", exported).code == 0
        held = files(made)
        git(exported, "reset", "--quiet", "--hard", "HEAD~2")
        assert made.run("--target", exported, "--commit").code == 0
        assert git(exported, "log", "-1", "--format=%B").split("\n")[0] == subject
        assert made.run("export", "--target", exported).code == 0
        assert files(made) == held

    def test_trap_24_an_empty_series_deletes_nothing(self, made: Project, exported: Path) -> None:
        before = files(made)
        git(exported, "reset", "--quiet", "--hard", "HEAD~2")
        result = made.run("export", "--target", exported)
        assert result.code == 3
        assert "nothing to export" in result.err
        assert files(made) == before

    def test_trap_24_a_missing_commit_deletes_nothing(self, made: Project, exported: Path) -> None:
        before = files(made)
        git(exported, "reset", "--quiet", "--hard", "HEAD~1")
        result = made.run("export", "--target", exported)
        assert result.code == 3
        assert "second" in result.err
        assert files(made) == before

    def test_an_edit_comes_back_with_its_hashes(self, made: Project, exported: Path) -> None:
        amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
        assert made.run("export", "--target", exported, "--dry-run").code == 1
        document = made.json("export", "--target", exported)
        assert document["changed"] == ["patches/second.patch", "patches/patchset.toml"]
        assert b"return 8" in files(made)["second.patch"]
        clone = exported.with_name("clone")
        git(exported.parent, "clone", "--quiet", str(exported), str(clone))
        git(clone, "reset", "--quiet", "--hard", "HEAD~2")
        assert made.run("--target", clone).code == 0
        assert b"return 8" in (clone / "vllm/sub/b.py").read_bytes()

    def test_a_dry_run_writes_nothing(self, made: Project, exported: Path) -> None:
        amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
        before = files(made)
        made.run("export", "--target", exported, "--dry-run")
        assert files(made) == before

    def test_comments_of_the_pin_file_are_kept(self, made: Project, exported: Path) -> None:
        pin = made.root / "patches/patchset.toml"
        pin.write_text("# kept\n" + pin.read_text().replace("[pin]", "[pin]  # kept too"))
        before = pin.read_bytes()
        amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
        made.run("export", "--target", exported)
        old, new = before.splitlines(), pin.read_bytes().splitlines()
        assert len(old) == len(new)
        assert sum(a != b for a, b in zip(old, new, strict=True)) == 1

    def test_a_new_patch_gets_its_rows(self, made: Project, exported: Path) -> None:
        pin = made.root / "patches/patchset.toml"
        pin.write_text(
            pin.read_text()
            + '\n[[patch]]\nname = "third"\nwhat = "w"\nwhy = "y"\nuntil = "u"\nfragments = []\noverlay = []\n'
        )
        place(
            exported,
            "vllm/sub/b.py",
            (exported / "vllm/sub/b.py").read_bytes().replace(b"stop", b"halt"),
        )
        git(exported, "commit", "--quiet", "--all", "--message", "Third\n\nPatch: third")
        result = made.run("export", "--target", exported)
        assert result.code == 0, result.text
        assert [row["name"] for row in made.json("list")["patches"]] == ["first", "second", "third"]
        again = pin.read_bytes()
        assert made.json("export", "--target", exported)["outcome"] == "unchanged"
        assert pin.read_bytes() == again

    def test_odd_bytes_survive_the_round_trip(self, made: Project, exported: Path) -> None:
        amend(
            exported,
            "vllm/sub/b.py",
            b"return 7",
            b"return 7  # caf\xe9 \x0c \x85 \xe2\x80\xa8 lone\rcr",
        )
        (exported / "vllm/sub/b.py").write_bytes((exported / "vllm/sub/b.py").read_bytes()[:-1])
        git(exported, "commit", "--quiet", "--all", "--amend", "--no-edit")
        assert made.run("export", "--target", exported).code == 0
        wanted = (exported / "vllm/sub/b.py").read_bytes()
        git(exported, "reset", "--quiet", "--hard", "HEAD~2")
        assert made.run("--target", exported, "--commit").code == 0
        assert (exported / "vllm/sub/b.py").read_bytes() == wanted
        assert made.json("export", "--target", exported)["outcome"] == "unchanged"

    @pytest.mark.parametrize(
        "config",
        [
            "[diff]\n\tnoprefix = true\n\talgorithm = patience\n\tcontext = 9\n\tmnemonicPrefix = true\n\texternal = false",
            "[core]\n\tautocrlf = true\n\tquotePath = false\n\tabbrev = 5\n[color]\n\tui = always\n\tdiff = always",
            "[format]\n\tattach\n\tsignOff = true\n\tsignature = me\n\theaders = \"X: y\"\n\tto = a@b\n\tthread = true",
            "[format]\n\tcoverLetter = true\n\tnumbered = true\n\tnotes = true\n\tfrom = c@d\n\tsubjectPrefix = ZZ",
            "[mailinfo]\n\tscissors = true\n[commit]\n\tgpgsign = true\n[apply]\n\twhitespace = fix\n[core]\n\tpager = false",
        ],
    )  # fmt: skip
    def test_the_users_git_settings_change_nothing(
        self, made: Project, exported: Path, config: str
    ) -> None:
        place(exported.parent, "gitconfig", (CONFIG + config + "\n").encode())
        assert made.json("export", "--target", exported)["outcome"] == "unchanged"
        git(exported, "-c", "core.autocrlf=false", "reset", "--quiet", "--hard", "HEAD~2")
        assert made.run("--target", exported, "--commit").code == 0
        assert made.json("export", "--target", exported)["outcome"] == "unchanged"

    def test_overlay_files_edited_in_the_checkout_come_back(
        self, made: Project, exported: Path
    ) -> None:
        amend(exported, "vllm/new/logic.py", b"42", b"43")
        assert made.json("export", "--target", exported)["changed"] == ["overlay/vllm/new/logic.py"]
        assert files(made)["vllm/new/logic.py"] == b"ANSWER = 43\n"

    def test_overlay_files_edited_here_are_not_lost(self, made: Project, exported: Path) -> None:
        place(made.root, "overlay/vllm/new/logic.py", b"ANSWER = 44\n")
        assert made.json("export", "--target", exported)["outcome"] == "unchanged"
        amend(exported, "vllm/new/logic.py", b"42", b"43")
        result = made.run("export", "--target", exported)
        assert result.code == 3
        assert "vllm/new/logic.py" in result.err
        assert files(made)["vllm/new/logic.py"] == b"ANSWER = 44\n"

    def test_a_second_overlay_edit_comes_back_too(self, made: Project, exported: Path) -> None:
        for old, new in ((b"42", b"43"), (b"43", b"44"), (b"44", b"42")):
            amend(exported, "vllm/new/logic.py", old, new)
            document = made.json("export", "--target", exported)
            assert document["changed"] == ["overlay/vllm/new/logic.py"]
            assert files(made)["vllm/new/logic.py"] == b"ANSWER = %s\n" % new

    def test_an_export_that_was_discarded_here_is_written_again(
        self, made: Project, exported: Path
    ) -> None:
        first = files(made)
        amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
        amend(exported, "vllm/new/logic.py", b"42", b"43")
        assert made.run("export", "--target", exported).code == 0
        wanted = files(made)
        for name in ("patches/second.patch", "patches/patchset.toml"):
            place(made.root, name, first[name.removeprefix("patches/")])
        place(made.root, "overlay/vllm/new/logic.py", first["vllm/new/logic.py"])
        assert made.json("export", "--target", exported)["changed"] == [
            "patches/second.patch", "overlay/vllm/new/logic.py", "patches/patchset.toml",
        ]  # fmt: skip
        assert files(made) == wanted

    @pytest.mark.parametrize("edited", [False, True], ids=["as applied", "edited too"])
    def test_an_older_checkout_takes_back_no_newer_patch(
        self, made: Project, exported: Path, edited: bool
    ) -> None:
        git(exported, "reset", "--quiet", "--hard", "HEAD~2")
        assert made.run("--target", exported, "--commit").code == 0
        other = exported.with_name("other")
        git(exported.parent, "clone", "--quiet", str(exported), str(other))
        amend(other, "vllm/sub/b.py", b"return 7", b"return 9")
        assert made.run("export", "--target", other).code == 0
        newer = files(made)
        if edited:
            amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
        result = made.run("export", "--target", exported)
        assert result.code == 3, result.text
        assert "patches/second.patch changed here since" in result.err
        assert "rm patches/second.patch, then export again" in result.err
        assert files(made) == newer
        (made.root / "patches/second.patch").unlink()  # what the message says
        assert made.run("export", "--target", exported).code == 0
        assert b"return 8" in files(made)["second.patch"] or not edited

    def test_a_damaged_record_counts_as_none(self, made: Project, exported: Path) -> None:
        record = exported / ".git/b12x-overlay-export.json"
        for text in ("{", "[]", '{"marker": 1}'):
            record.write_text(text)
            assert made.run("export", "--target", exported).code == 0
        assert json.loads(record.read_text())["files"].keys() >= {"patches/second.patch"}

    def test_what_a_set_cannot_hold_is_refused_and_named(
        self, made: Project, exported: Path
    ) -> None:
        before = files(made)
        tip = git(exported, "rev-parse", "HEAD")

        def refused(*words: str) -> None:
            result = made.run("export", "--target", exported)
            assert result.code == 3, result.text
            assert all(word in result.err for word in words), result.err
            assert files(made) == before
            git(exported, "reset", "--quiet", "--hard", tip)
            git(exported, "clean", "--quiet", "-d", "--force")

        def amended(*message: str) -> None:
            git(exported, "add", "--all")
            git(exported, "commit", "--quiet", "--amend", *(message or ("--no-edit",)))

        place(exported, "vllm/new/more.py", b"x = 1\n")  # imported somewhere, and not added
        refused("not committed", "vllm/new/more.py")
        (exported / "vllm/sub/b.py").chmod(0o755)
        amended()
        refused("changes the mode of vllm/sub/b.py from 100644 to 100755")
        (exported / "vllm/new/logic.py").unlink()
        (exported / "vllm/new/logic.py").symlink_to("other.py")
        amended()
        refused("vllm/new/logic.py", "no plain file")
        git(exported, "rm", "--quiet", "vllm/new/logic.py")
        amended()
        refused("vllm/new/logic.py was deleted", "remove overlay/vllm/new/logic.py")
        for line in ("---", "diff --git a/x b/x"):
            amended("--message", f"Second\n\nas\n{line}\nsays\n\nPatch: second")
            refused("message of second", "'---' or 'diff --git'")
        git(exported, "reset", "--quiet", "--hard", "HEAD~1")
        git(exported, "commit", "--quiet", "--amend", "--message", "First without its line")
        git(exported, "cherry-pick", "--quiet", tip)
        refused("first is in patches/patchset.toml", "ends at", "First without its line; no line")

    def test_an_overlay_file_that_no_patch_lists_stops_export(
        self, made: Project, exported: Path
    ) -> None:
        place(made.root, "overlay/vllm/other/more.py", b"x = 1\n")
        before = files(made)
        result = made.run("export", "--target", exported)
        assert (result.code, files(made)) == (3, before)
        assert "overlay/vllm/other/more.py belongs to no patch" in result.err

    def test_a_set_that_would_not_load_is_not_written(self, made: Project, exported: Path) -> None:
        amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
        (made.root / "overlay/vllm/new/logic.py").unlink()
        before = files(made)
        for flags in ((), ("--dry-run",)):
            result = made.run("export", "--target", exported, *flags)
            assert (result.code, files(made)) == (3, before), result.text
            assert "the set would not be in order: " in result.err
            assert "nothing was written" in result.err
            assert "/tmp/tmp" not in result.err
            assert "next: git -C" in result.err

    def test_a_head_that_holds_the_set_without_a_series(
        self, made: Project, checkout: Path
    ) -> None:
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

    def test_refusals(self, made: Project, exported: Path) -> None:
        before = files(made)

        def refused(words: str) -> None:
            result = made.run("export", "--target", exported)
            assert result.code == 3, result.text
            assert words in result.err
            assert files(made) == before
            git(exported, "reset", "--quiet", "--hard", tip)

        tip = git(exported, "rev-parse", "HEAD")
        place(exported, "vllm/a.py", b"dirty\n")
        refused("not committed")
        place(exported, "vllm/added.py", b"x\n")
        git(exported, "add", "--all")
        git(exported, "commit", "--quiet", "--amend", "--no-edit")
        refused("adds vllm/added.py")
        git(exported, "rm", "--quiet", "vllm/sub/b.py")
        git(exported, "commit", "--quiet", "--amend", "--no-edit")
        refused("deletes vllm/sub/b.py")
        git(exported, "commit", "--quiet", "--allow-empty", "--message", "More\n\nPatch: second")
        refused("2 commits for second")
        git(exported, "commit", "--quiet", "--allow-empty", "--message", "Odd\n\nPatch: odd")
        refused("no [[patch]]")
        git(exported, "commit", "--quiet", "--allow-empty", "--message", "No name")
        refused("nothing to export")


def test_this_repositorys_patches_are_what_export_writes(build: Path, tmp_path: Path) -> None:
    """The real set on the pinned source distribution's files: apply --commit, then export finds nothing to change."""
    loaded = patchset.load(REPO / "patches", REPO / "overlay")
    archive = places.SOURCES / loaded.pin.sdist.filename
    if not archive.exists():
        pytest.skip(f"{archive} is missing; scripts/test fetches it")
    checkout = lay(tmp_path / "checkout", {})
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if path in loaded.chains and (stream := tar.extractfile(member)):
                place(checkout, path, stream.read(), 0o755 if member.mode & 0o100 else 0o644)
    git(checkout, "init", "--quiet")
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "vLLM")
    command = str(REPO / "scripts/apply-patches")
    for args in (["--commit"], ["export", "--dry-run"]):
        words = [command, *args, "--target", str(checkout)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
