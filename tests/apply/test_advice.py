# SPDX-License-Identifier: Apache-2.0
"""Messages name the file and a next command that works when it is pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from apply.factory import PYTHON, Project, Series, lay, lay_installed
from apply.wheels import wheel

MARKER = "vllm/b12x_patchset.py"


def pasted(made: Project, text: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a ``next:`` line as a shell does; what follows the command in the sentence is left out."""
    line = next(line for line in text.splitlines() if line.startswith("next: "))
    words = shlex.split(line.removeprefix("next: "))
    end = next((words.index(word) for word in ("applies", "writes") if word in words), len(words))
    return subprocess.run(
        words[:end], cwd=made.root, env=made.env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("verb", ["status", "apply --dry-run", "revert"])
def test_the_next_command_can_be_pasted(
    made: Project, tmp_path: Path, series: Series, verb: str
) -> None:
    site = lay_installed(tmp_path / "it's a föld er", series.base)
    result = made.run(*verb.split(), "--target", site)
    done = pasted(made, result.out)
    assert done.returncode == 0, (result.out, done.stderr)
    assert made.run("status", "--target", site).code == 0


def test_for_the_word_installed_it_names_the_python(made: Project, site: Path) -> None:
    """The shebang's Python has another vLLM, or none."""
    env = {"PYTHONPATH": str(site)}
    for verb in ("status", "revert"):
        words = shlex.split(made.run(verb, "--target", "installed", env=env).out.splitlines()[-1])
        assert words[1:5] == [PYTHON, "scripts/apply-patches", "--target", "installed"]


def test_what_makes_a_target_incomplete_is_named(made: Project, site: Path) -> None:
    made.run("--target", site)
    for path in ("vllm/new/logic.py", MARKER):
        kept = (site / path).read_bytes()
        (site / path).unlink()
        result = made.run("status", "--target", site)
        assert (result.code, "incomplete" in result.out) == (1, True)
        assert f"{path}: not applied" in result.out
        (site / path).write_bytes(kept)
    assert made.run("status", "--target", site).code == 0


@pytest.mark.parametrize("place", ["start", "end"])
def test_an_edit_after_two_patches_of_a_file_is_not_called_half_of_the_first(
    made: Project, site: Path, series: Series, place: str
) -> None:
    """The second patch's lines may stand between the first one's."""
    first = series.patches[0][1]["vllm/a.py"]
    closer = first.replace(b"line 6\n", b"line 6\nline 6 and a half\n")
    series.patches[1][1]["vllm/a.py"] = closer
    made.write(series)
    assert made.run("--target", site).code == 0
    data = (site / "vllm/a.py").read_bytes()
    (site / "vllm/a.py").write_bytes(b"# mine\n" + data if place == "start" else data + b"# mine\n")
    document = made.json("status", "--target", site)
    reasons = [patch["files"][0]["reason"] for patch in document["patches"]]
    assert reasons == ["edited", "edited"]
    (site / "vllm/a.py").write_bytes(data.replace(b"line five\n", b"line 5\n"))
    document = made.json("status", "--target", site)
    assert document["patches"][0]["files"][0]["reason"] == "half-edited"


def test_status_and_apply_give_the_same_advice_on_a_foreign_file(made: Project, site: Path) -> None:
    made.run("--target", site)
    (site / "vllm/new/logic.py").write_bytes(b"mine\n")
    advice = {made.json(verb, "--target", site)["next"] for verb in ("status", "apply", "revert")}
    assert len(advice) == 1
    assert "vllm/new/logic.py is not this set's file: move it away" in advice.pop()


@pytest.fixture
def bound() -> tuple[str, ...]:
    """Words before a command by which file modes hold for root, too."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root, and no setpriv to give up root's right to pass over file modes")
    return ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")


def test_a_folder_that_cannot_be_written_is_named(
    made: Project, site: Path, bound: tuple[str, ...]
) -> None:
    (site / "vllm").chmod(0o555)
    result = made.run("--target", site, python=(*bound, PYTHON))
    (site / "vllm").chmod(0o755)
    assert result.code == 3
    folder = site / "vllm"
    assert f"{folder} is not writable (Permission denied); nothing was changed" in result.err
    assert f"next: make {folder} writable" in result.err


def test_a_file_that_cannot_be_read_is_no_link(
    made: Project, site: Path, bound: tuple[str, ...]
) -> None:
    (site / "vllm/a.py").chmod(0)
    result = made.run("status", "--target", site, python=(*bound, PYTHON))
    assert result.code == 1
    assert "next: make vllm/a.py readable for this user" in result.out


@pytest.mark.parametrize(
    "args",
    [("--target", "none.whl"), ("--target", "folder.whl"), ("--target", "tree", "--commit"), ("export", "--target", "tree"), ("--target", "sub")],
)  # fmt: skip
def test_every_refusal_has_a_next_step(
    made: Project, tmp_path: Path, series: Series, args: tuple[str, ...]
) -> None:
    lay(tmp_path / "tree", series.base)
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder.whl").mkdir()
    result = made.run(*args, cwd=tmp_path)
    assert result.code == 3
    assert "\nnext: " in result.err
    assert "next: --" not in result.err  # a flag alone is no command


@pytest.mark.parametrize("damage", ["patchset.toml", "first.patch"])
def test_a_damaged_patch_set_has_a_next_step(made: Project, site: Path, damage: str) -> None:
    path = made.root / "patches" / damage
    path.write_bytes(path.read_bytes()[:-40])
    result = made.run("status", "--target", site)
    assert result.code == 4
    next_step = result.err.splitlines()[-1]
    assert next_step.startswith(f"next: git -C {made.root} status -- patches overlay")


def test_paths_in_commands_are_quoted(made: Project, tmp_path: Path, series: Series) -> None:
    tree = lay(tmp_path / "it's a tree", series.base)
    lock = tree / ".git/index.lock"
    lock.parent.mkdir()
    lock.touch()
    result = made.run("--target", tree)
    assert result.code == 3
    words = shlex.split(result.err.splitlines()[-1].partition("running: ")[2])
    assert words == ["rm", str(lock)]


@pytest.mark.parametrize("own", [True, False])
def test_a_damaged_archive_is_to_be_removed_only_where_it_was_fetched_to(
    made: Project, tmp_path: Path, own: bool
) -> None:
    folder = tmp_path if own else made.root / "build/sources"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm-0.32.0.tar.gz").write_bytes(b"x")
    result = made.run("bump", folder / "vllm-0.32.0.tar.gz" if own else "0.32.0")
    assert (result.code, "next: rm" in result.err) == (3, not own)


def test_a_full_disk_while_writing_a_wheel_is_one_message(
    made: Project, tmp_path: Path, series: Series
) -> None:
    path = wheel(tmp_path, {**series.base, "vllm/big.py": os.urandom(1 << 16)})
    limited = f'ulimit -f 16; exec "$0" "$1" --target "$2" --output "{tmp_path / "out"}"'
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; {limited}", PYTHON, str(made.command), str(path)],
        capture_output=True, text=True, env=made.env, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    result = tmp_path / "out" / "vllm-0.33.0+b12x.1-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert done.stderr.splitlines()[1:] == [
        f"error: {result} cannot be written: File too large",
        "next: give --output a folder that can be written and has space",
    ]
    assert list((tmp_path / "out").iterdir()) == []
