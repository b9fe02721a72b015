# SPDX-License-Identifier: Apache-2.0
"""export: a round trip changes no byte, an edit comes back with its hashes (trap 24)."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
from apply.checkouts import CONFIG, amend, files, git
from apply.factory import REPO, Project, lay, place
from b12x_overlay.patching import patchset
from support import paths as places


def test_a_round_trip_changes_no_byte(made: Project, exported: Path) -> None:
    before = files(made)
    document = made.json("export", "--target", exported)
    assert (document["exit"], document["outcome"], document["changed"]) == (0, "unchanged", [])
    assert files(made) == before
    clone = exported.with_name("clone")
    git(exported.parent, "clone", "--quiet", "--branch", "main", str(exported), str(clone))
    git(clone, "reset", "--quiet", "--hard", "HEAD~2")
    assert made.run("--target", clone, "--commit").code == 0
    assert made.json("export", "--target", clone)["outcome"] == "unchanged"


@pytest.mark.parametrize("subject", ["[perf] x", "[PATCH] y: z", "Re: [RFC] caf\u00e9 \u2028 w"])
def test_trap_24_bracketed_subjects_survive(made: Project, exported: Path, subject: str) -> None:
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


def test_an_edit_comes_back_with_its_hashes(made: Project, exported: Path) -> None:
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


def test_a_dry_run_writes_nothing(made: Project, exported: Path) -> None:
    amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
    before = files(made)
    made.run("export", "--target", exported, "--dry-run")
    assert files(made) == before


def test_comments_of_the_pin_file_are_kept(made: Project, exported: Path) -> None:
    pin = made.root / "patches/patchset.toml"
    pin.write_text("# kept\n" + pin.read_text().replace("[pin]", "[pin]  # kept too"))
    before = pin.read_bytes()
    amend(exported, "vllm/sub/b.py", b"return 7", b"return 8")
    made.run("export", "--target", exported)
    old, new = before.splitlines(), pin.read_bytes().splitlines()
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1


def test_a_new_patch_gets_its_rows(made: Project, exported: Path) -> None:
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


def test_odd_bytes_survive_the_round_trip(made: Project, exported: Path) -> None:
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
def test_the_users_git_settings_change_nothing(made: Project, exported: Path, config: str) -> None:
    place(exported.parent, "gitconfig", (CONFIG + config + "\n").encode())
    assert made.json("export", "--target", exported)["outcome"] == "unchanged"
    git(exported, "-c", "core.autocrlf=false", "reset", "--quiet", "--hard", "HEAD~2")
    assert made.run("--target", exported, "--commit").code == 0
    assert made.json("export", "--target", exported)["outcome"] == "unchanged"


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
