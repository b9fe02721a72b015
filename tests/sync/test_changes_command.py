# SPDX-License-Identifier: Apache-2.0
"""scripts/changes as a user meets it: verbs, exit codes, output, bad input."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from b12x_overlay.changes.cli import main
from b12x_overlay.paths import CHANGES, REPO
from sync.fragments import write

PATCHSET = """schema = 1
[[patch]]
name = "one"
fragments = ["vllm-one"]
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with one fragment, a patch set that names it, and a commit."""
    subprocess.run(["git", "init", "-q", "-b", "main", tmp_path], check=True)
    write(tmp_path / "changes")
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "patchset.toml").write_text(PATCHSET)
    commit(tmp_path)
    return tmp_path


def commit(repo: Path) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", repo, "add", "-A"], check=True)
    subprocess.run(["git", "-C", repo, *identity, "commit", "-qm", "x"], check=True)


def changes(repo: Path, verb: str, *args: str) -> int:
    return main([verb, "--folder", str(repo / "changes"), *args])


def test_this_repositorys_fragments_are_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0, capsys.readouterr().out
    assert main(["published"]) == 0


def test_check_prints_each_fault_with_file_path_and_fix(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(repo, "check") == 0
    write(repo / "changes", "vllm-two", models=[])
    (repo / "changes" / "notes.md").write_text("x")
    assert changes(repo, "check") == 1
    out = capsys.readouterr().out
    assert f"{repo}/changes/vllm-two.json: $.models: is empty\n    fix: " in out
    assert f"{repo}/changes/notes.md: is not a fragment" in out


def test_check_json_goes_to_stdout_and_text_to_stderr(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repo / "changes", "vllm-two", models=[])
    assert changes(repo, "check", "--json") == 1
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["ok"] is False
    assert [(fault["file"], fault["path"]) for fault in document["faults"]] == [
        ("vllm-two.json", "$.models")
    ]
    assert "$.models" in told.err


def test_check_sees_the_patch_set(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "changes" / "vllm-one.json").unlink()
    assert changes(repo, "check") == 1
    assert "names the fragment vllm-one, which is missing" in capsys.readouterr().out
    assert changes(repo, "check", "--patchset", "none") == 0
    (repo / "patches" / "patchset.toml").write_text("[[patch")
    assert changes(repo, "check") == 1
    assert "patchset.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x = 1\n", "is no patch set"),
        ('[[patch]]\nname = "one"\n[[patch]]\nname = 3\n', "number 2"),
    ],
)
def test_a_file_that_is_no_patch_set_is_not_taken_for_an_empty_one(
    repo: Path, capsys: pytest.CaptureFixture[str], text: str, word: str
) -> None:
    (repo / "other.toml").write_text(text)
    assert changes(repo, "check", "--patchset", str(repo / "other.toml")) == 1
    assert word in capsys.readouterr().err


def test_json_of_a_refusal_names_the_faults(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--id", "vllm-two", "--category", "fix", "--summary", "S.", "--author", "a b"]
    assert changes(repo, "new", *flags, "--requires", "vllm-twoo", "--json") == 1
    told = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "$.authors[0]" in told
    assert "$.requires[0]" in told
    assert 'write "vllm-two"' not in told  # that would be a cycle
    write(repo / "changes", "vllm-two", models=[])
    for verb in (("notes",), ("receipt", "--release", "beta-1")):
        assert changes(repo, *verb, "--json") == 1
        assert "$.models: is empty" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_way_back_of_a_published_fragment_works_as_printed(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changes(repo, "receipt", "--release", "beta-1") == 0
    path = repo / "changes" / "vllm-one.json"
    old = path.read_bytes()
    path.unlink()
    capsys.readouterr()
    assert changes(repo, "check", "--patchset", "none") == 1
    out = capsys.readouterr().out
    command = out.partition("(in its folder: ")[2].partition(")")[0]
    subprocess.run(command, shell=True, cwd=path.parent, check=True)
    assert path.read_bytes() == old


def test_another_folder_and_component(tmp_path: Path) -> None:
    write(tmp_path / ".lil" / "changes", "b12x-469")
    folder = str(tmp_path / ".lil" / "changes")
    assert main(["check", "--folder", folder]) == 1
    assert main(["check", "--folder", folder, "--component", "b12x"]) == 0
    assert main(["check", "--folder", folder, "--component", "b 12"]) == 2


def test_missing_folder_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--folder", str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["check", "--folder", str(tmp_path / "file")]) == 2


def test_a_release_from_receipt_to_correction(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        changes(repo, "receipt", "--release", "beta-1", "--published-at", "2026-11-01T00:00:00Z")
        == 0
    )
    assert changes(repo, "published") == 0
    assert "vllm-one" in capsys.readouterr().out

    assert changes(repo, "receipt", "--release", "beta-1") == 3  # never rewritten
    assert (
        changes(repo, "receipt", "--release", "beta-0", "--published-at", "2026-10-01T00:00:00Z")
        == 3
    )
    assert changes(repo, "receipt", "--release", "a/b") == 2
    assert changes(repo, "receipt", "--release", "b", "--published-at", "now") == 2

    path = repo / "changes" / "vllm-one.json"
    old = path.read_bytes()
    path.write_text(json.dumps(json.loads(old), indent=4) + "\n")
    assert changes(repo, "check") == 1
    assert "re-formatted" in capsys.readouterr().out
    assert changes(repo, "published", "--json") == 1
    assert changes(repo, "notes") == 1
    path.write_bytes(old)

    new = [
        "--id",
        "vllm-one-correction",
        "--category",
        "fix",
        "--summary",
        "Better.",
        "--author",
        "octocat",
    ]
    assert changes(repo, "new", *new, "--requires", "vllm-one") == 0
    capsys.readouterr()
    assert changes(repo, "notes") == 0
    out = capsys.readouterr().out
    assert "Changes since beta-1" in out
    assert "**Better.**" in out
    assert "One thing works" not in out
    assert changes(repo, "receipt", "--release", "beta-2") == 0
    assert changes(repo, "notes", "--since", "beta-1", "--json") == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["count"] == 1


def test_notes_since_a_commit_a_file_or_nothing(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repo / "changes", "vllm-two", summary="Second.")
    assert changes(repo, "notes", "--since", "HEAD") == 0
    out = capsys.readouterr().out
    assert "Second." in out
    assert "One thing" not in out
    assert changes(repo, "notes", "--since", "none") == 0
    assert "One thing" in capsys.readouterr().out
    assert changes(repo, "notes", "--since", "v9") == 2
    assert "no release, receipt file, commit or tag" in capsys.readouterr().err
    assert changes(repo, "notes", "--since", str(repo / "patches" / "patchset.toml")) == 3


def test_new_refuses_and_writes_nothing(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((repo / "changes").iterdir())
    good = ["--category", "fix", "--summary", "x", "--author", "octocat"]
    assert changes(repo, "new", "--id", "vllm-one", *good) == 3  # exists
    assert changes(repo, "new", "--id", "vllm-x") == 2  # missing flags, no terminal
    assert changes(repo, "new", "--id", "../vllm-x", *good) == 1
    assert changes(repo, "new", "--id", "b12x-x", *good) == 1
    assert changes(repo, "new", "--id", "vllm-x", *good, "--requires", "vllm-nowhere") == 1
    assert changes(repo, "new", "--id", "vllm-x", *good, "--author", "@me") == 1
    assert (
        changes(
            repo, "new", "--id", "vllm-x", "--category", "fix", "--summary", "a\nb", "--author", "o"
        )
        == 1
    )
    assert changes(repo, "new", "--id", "vllm-x", *good, "--dry-run") == 0
    assert sorted((repo / "changes").iterdir()) == before
    assert "nothing was written" in capsys.readouterr().err


def test_new_asks_at_a_terminal(repo: Path) -> None:
    """The real command at a pseudo-terminal; the wrong category is asked for again."""
    leader, follower = pty.openpty()
    answers = "vllm-asked\nbug\nfeature\nIt asks.\n\n\n#970, 971\n\n"
    os.write(leader, answers.encode())
    code = f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r}); from b12x_overlay.changes.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.exit(main(sys.argv[1:]))", "new", "--folder", str(repo / "changes")],
        stdin=follower, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(leader)
    os.close(follower)
    assert done.returncode == 0, done.stderr
    written = json.loads((repo / "changes" / "vllm-asked.json").read_text())
    assert written == {
        "schema": "local-inference-release-change/v1", "id": "vllm-asked", "category": "feature",
        "summary": "It asks.", "models": ["all"], "compatibility": "No user action required.",
        "pull_requests": [970, 971],
    }  # fmt: skip
    assert done.stderr.count("category") == 2


def test_a_written_fragment_has_the_schemas_order_and_passes_check(repo: Path) -> None:
    flags = [
        "--id",
        "vllm-x",
        "--category",
        "fix",
        "--summary",
        "ß",
        "--author",
        "octocat",
        "--model",
        "m",
    ]
    assert changes(repo, "new", *flags, "--evidence", "https://example.org", "--detail", "d") == 0
    data = (repo / "changes" / "vllm-x.json").read_text(encoding="utf-8")
    assert list(json.loads(data)) == [
        "schema", "id", "category", "summary", "models", "compatibility", "details", "authors", "evidence",
    ]  # fmt: skip
    assert "ß" in data
    assert changes(repo, "check") == 0


def test_the_wrong_lines_file_is_named(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / ".ci").mkdir()
    for text in ("[lines", "[lines]\nbeat = 'x'\n", "[line]\n", "[fragments]\ncomponent = 1\n"):
        (repo / ".ci" / "lines.toml").write_text(text)
        assert changes(repo, "check") == 2
        assert "lines.toml" in capsys.readouterr().err


def test_git_attributes_keep_fragments_and_patches_lf() -> None:
    names = [f"changes/{next(CHANGES.glob('*.json')).name}", "patches/zeroed-input-scales.patch"]
    told = subprocess.run(
        ["git", "-C", REPO, "check-attr", "eol", *names], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert told == [f"{name}: eol: lf" for name in names]


def test_ctrl_c_before_the_command_has_begun_is_no_traceback() -> None:
    """While its libraries are imported, or its environment is set up."""
    code = (
        f"import sys; sys.path.insert(0, {str(REPO / 'scripts')!r})\n"
        "from b12x_overlay import bootstrap, paths\n"
        "bootstrap.environment = lambda name: paths.Path(sys.prefix)\n"
        "bootstrap.reexec('changes')\n"
        "raise KeyboardInterrupt"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (-2, 130)
    assert done.stderr == "error: interrupted\n"
