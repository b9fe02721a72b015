# SPDX-License-Identifier: Apache-2.0
"""Property: for any edit, this engine gives the bytes that ``git apply`` gives in a clean repository, or refuses.

On the file that a patch was made for it must not refuse. On another file git may move a hunk; this engine may not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from apply.factory import unified
from b12x_overlay.patching import diff, hunks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATH = "vllm/a.py"
GIT_ENV = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}
TOKENS = [
    b"a", b"b", b"x = 1", b"    return x", b"", b"}", b"\xe9t\xe9", b"cr\rcr", b"ff\x0c", b"nel\x85", b"crlf\r",
    "u\u2028\u2029v".encode(), b"\t tab ", b"--- a/x", b"+++ b/x", b"@@ -1 +1 @@", b"diff --git a/x b/x", b"-- ",
    b"\\ No newline at end of file", b"From abc", b"\xff\xfe\x80",
]  # fmt: skip
LINES = st.lists(st.sampled_from(TOKENS), max_size=14)
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def joined(lines: list[bytes], last: bool) -> bytes:
    """A file of these lines, the last one with or without its end."""
    return b"\n".join(lines) + (b"\n" if last and lines else b"")


@st.composite
def edits(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A file and an edited version of it, different from each other."""
    old = draw(LINES)
    new = list(old)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(new)))
        new[at : at + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(TOKENS), max_size=3))
    before, after = joined(old, draw(st.booleans())), joined(new, draw(st.booleans()))
    if before == after or not before or not after:
        after = b"other\n" + before
        before = before or b"first\n"
    return before, after


@pytest.fixture(scope="module")
def repo() -> Iterator[Path]:
    """A clean repository, in memory where there is one."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        root = Path(folder)
        subprocess.run(["git", "init", "--quiet", root], check=True, env=GIT_ENV)
        (root / "vllm").mkdir()
        yield root


def git_diff(repo: Path, old: bytes, new: bytes, context: int) -> bytes:
    """git's own patch from *old* to *new*."""
    for side, data in (("a", old), ("b", new)):
        file = repo / side / PATH
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    command = [
        "git",
        "diff",
        "--no-index",
        "--no-prefix",
        "--text",
        "--no-color",
        f"-U{context}",
        f"a/{PATH}",
        f"b/{PATH}",
    ]
    return subprocess.run(command, cwd=repo, capture_output=True, check=False, env=GIT_ENV).stdout


def git_apply(repo: Path, data: bytes, patch: bytes) -> bytes | None:
    """What ``git apply`` makes of *data*, or None if it refuses."""
    file = repo / PATH
    file.write_bytes(data)
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    done = subprocess.run(
        command, cwd=repo, input=patch, capture_output=True, check=False, env=GIT_ENV
    )
    return file.read_bytes() if done.returncode == 0 else None


def ours(data: bytes, patch: bytes) -> bytes | None:
    """What this engine makes of *data*, or None if it refuses."""
    try:
        (one,) = diff.parse(patch)
        return hunks.apply(one, data)
    except (diff.PatchFormatError, hunks.HunkError):
        return None


@SETTINGS
@given(edit=edits(), context=st.integers(1, 4))
def test_gits_patch_gives_gits_bytes_and_back(
    repo: Path, edit: tuple[bytes, bytes], context: int
) -> None:
    old, new = edit
    patch = git_diff(repo, old, new, context)
    (one,) = diff.parse(patch)
    assert hunks.apply(one, old) == new == git_apply(repo, old, patch)
    assert hunks.reverse(one, new) == old


@SETTINGS
@given(edit=edits(), other=edits(), context=st.integers(0, 3))
def test_on_another_file_the_same_bytes_or_a_refusal(
    repo: Path, edit: tuple[bytes, bytes], other: tuple[bytes, bytes], context: int
) -> None:
    patch = git_diff(repo, *edit, context)
    for data in (*other, edit[1], b"z\n" + edit[0], edit[0] + b"z\n"):
        made = ours(data, patch)
        assert made is None or made == git_apply(repo, data, patch)


@SETTINGS
@given(edit=edits(), context=st.integers(0, 3))
def test_difflibs_patch_the_same_bytes_or_a_refusal(
    repo: Path, edit: tuple[bytes, bytes], context: int
) -> None:
    old, new = edit
    patch = unified(PATH, old, new, context=context)
    made = ours(old, patch)
    if made is not None:
        assert made == new == git_apply(repo, old, patch)
    if context:
        assert made is not None


@SETTINGS
@given(
    edit=edits(),
    cut=st.integers(1, 400),
    junk=st.sampled_from([b"", b"+x\n", b" x\n", b"@@ -1 +1 @@\n"]),
)
def test_a_damaged_patch_is_refused_or_means_what_git_reads(
    repo: Path, edit: tuple[bytes, bytes], cut: int, junk: bytes
) -> None:
    old, _ = edit
    patch = git_diff(repo, *edit, 3)
    damaged = patch[: max(0, len(patch) - cut)] + junk
    made = ours(old, damaged)
    assert made is None or made == git_apply(repo, old, damaged)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(edit=edits(), modes=st.tuples(st.booleans(), st.booleans()))
def test_modes_as_git_reads_them(
    repo: Path, edit: tuple[bytes, bytes], modes: tuple[bool, bool]
) -> None:
    for side, data, mode in zip("ab", edit, modes, strict=True):
        file = repo / side / PATH
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o755 if mode else 0o644)
    command = ["git", "diff", "--no-index", "--no-prefix", "--text", f"a/{PATH}", f"b/{PATH}"]
    patch = subprocess.run(command, cwd=repo, capture_output=True, check=False, env=GIT_ENV).stdout
    (one,) = diff.parse(patch)
    assert hunks.apply(one, edit[0]) == edit[1]
    changed = modes[0] != modes[1]
    assert (one.old_executable, one.new_executable) == (modes if changed else (None, None))
    for side in "ab":
        (repo / side / PATH).unlink()
