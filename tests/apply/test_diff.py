# SPDX-License-Identifier: Apache-2.0
"""The diff parser: what it reads, what it refuses and by which words; places that a hunk fits, for reports."""

from __future__ import annotations

import pytest
from apply.conftest import A
from apply.factory import unified
from b12x_overlay.patching import diff, hunks
from b12x_overlay.patching.fit import Fit, carry, fit_file, summary

HEAD = b"diff --git a/vllm/a.py b/vllm/a.py\n"
NAMES = b"--- a/vllm/a.py\n+++ b/vllm/a.py\n"
HUNK = b"@@ -1,2 +1,2 @@\n-a\n+b\n c\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "no diff found"),
        (b"just text\n", "no diff found"),
        (HEAD, "corrupt or truncated"),
        (HEAD + NAMES, "corrupt or truncated"),
        (HEAD + NAMES + b"@@ -1,2 +1,2 @@\n-a\n+b\n", "wants 2 old and 2 new lines, found 1 and 1"),
        (HEAD + NAMES + b"@@ -1,2 +1,2 @@\n-a\n+b\n c", "corrupt or truncated"),
        (HEAD + NAMES + HUNK + b"+d\n", "more lines than the hunk's counts"),
        (HEAD + NAMES + HUNK + b"@@ -2,1 +2,1 @@\n-c\n+d\n", "contradict each other"),
        (HEAD + NAMES + b"@@ -1,1 +3,1 @@\n-a\n+b\n", "contradict each other"),
        (HEAD + NAMES + b"@@ -1 +1 @@\n a\n", "changes nothing"),
        (HEAD + NAMES.replace(b"\n", b"\r\n") + HUNK, "line endings"),
        (HEAD + b"GIT binary patch\n", "binary, rename and copy are not supported"),
        (
            HEAD + b"similarity index 90%\nrename from vllm/a.py\n",
            "binary, rename and copy are not supported",
        ),
        (HEAD + b"old mode 100644\nnew mode 120000\n", "only plain files"),
        (HEAD + b"old mode 100644\n", "only one of old mode and new mode"),
        (HEAD + b"new file mode 100644\n" + NAMES + HUNK, "disagree"),
        (b"--- a/vllm/a.py\n+++ b/vllm/b.py\n" + HUNK, "renames are not supported"),
        (b"--- a/../../etc/passwd\n+++ b/../../etc/passwd\n" + HUNK, "not a plain relative path"),
        (b"--- a//etc/passwd\n+++ b//etc/passwd\n" + HUNK, "not a plain relative path"),
        (b"--- a/.git/config\n+++ b/.git/config\n" + HUNK, "inside a git folder"),
        (HEAD + NAMES + HUNK + HEAD + NAMES + HUNK, "appears twice"),
        (HUNK, "without a file header"),
    ],
)
def test_refusals(text: bytes, words: str) -> None:
    with pytest.raises(diff.PatchFormatError) as error:
        diff.parse(text)
    assert words in str(error.value)


def test_a_mail_around_the_diff_is_passed_over() -> None:
    mail = (
        b"From: A <a@b>\nSubject: [perf] x\n\n--- is text\n---\n 1 file changed\n\n"
        + HEAD
        + NAMES
        + HUNK
        + b"-- \n2.39.5\n"
    )
    (one,) = diff.parse(mail)
    assert (one.path, one.added, one.removed) == ("vllm/a.py", 1, 1)


def test_quoted_names() -> None:
    name = b'"a/vllm/\\303\\251\\t.py"'
    (one,) = diff.parse(b"--- " + name + b"\n+++ " + name.replace(b"a/", b"b/", 1) + b"\n" + HUNK)
    assert one.path == "vllm/é\t.py"


def test_created_and_deleted_files_are_marked() -> None:
    new, gone = (
        b"--- /dev/null\n+++ b/vllm/n.py\n@@ -0,0 +1 @@\n+x\n",
        b"--- a/vllm/d.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
    )
    made, removed = diff.parse(new + gone)
    assert (made.creates, removed.deletes) == (True, True)
    assert hunks.apply(made, b"") == b"x\n"
    assert hunks.apply(removed, b"x\n") == b""


def test_a_mismatch_names_line_wanted_and_found() -> None:
    (one,) = diff.parse(unified("vllm/a.py", A, A.replace(b"line 20\n", b"x\n")))
    with pytest.raises(hunks.HunkError) as error:
        hunks.apply(one, A.replace(b"line 19\n", b"line 19!\n"))
    assert str(error.value) == "vllm/a.py:19: wanted 'line 19', found 'line 19!'"


def test_a_short_file_is_a_mismatch() -> None:
    (one,) = diff.parse(unified("vllm/a.py", A, A.replace(b"line 20\n", b"x\n")))
    with pytest.raises(hunks.HunkError, match="end of file"):
        hunks.apply(one, b"line 1\n")


class TestFit:
    """Where a hunk stands in another release, for bump and for the reasons of a refusal."""

    NEW = A.replace(b"line 20\n", b"line twenty\n")

    def fit(self, data: bytes, new: bytes = NEW, old: bytes = A) -> tuple[Fit, list[str]]:
        (one,) = diff.parse(unified("vllm/a.py", old, new))
        fits = fit_file(one, data)
        return summary(fits), [each.detail for each in fits]

    def test_exact(self) -> None:
        assert self.fit(A + b"more\n")[0] is Fit.EXACT

    def test_moved(self) -> None:
        assert self.fit(b"more\n" + A) == (Fit.MOVED, ["moved by +1 lines"])

    def test_absorbed(self) -> None:
        assert self.fit(b"more\n" + self.NEW)[0] is Fit.ABSORBED

    def test_an_absorbed_insertion_is_not_taken_for_an_exact_one(self) -> None:
        old = b"a\nb\nc\nx1\nx2\nx3\nz1\nz2\nz3\nend\n"
        new = old.replace(b"x3\n", b"x3\ny\nx1\nx2\nx3\n")
        assert self.fit(new, new, old)[0] is Fit.ABSORBED

    def test_conflict_names_wanted_and_found(self) -> None:
        kind, details = self.fit(A.replace(b"line 19\n", b"line nineteen\n"))
        assert (kind, details) == (Fit.CONFLICT, ["wanted 'line 19', found 'line nineteen'"])

    def test_several_places_are_a_conflict(self) -> None:
        kind, (detail,) = self.fit(b"x\n" + A + A)
        assert kind is Fit.CONFLICT
        assert "several places" in detail

    def test_line_endings_are_named(self) -> None:
        kind, (detail,) = self.fit(A.replace(b"\n", b"\r\n"))
        assert kind is Fit.CONFLICT
        assert "line endings" in detail

    def test_another_class_is_a_conflict(self) -> None:
        body = b"    def f(self):\n        x = 1\n        y = 2\n        return x\n\n\n"
        old = b"class A:\n" + body.replace(b"x = 1", b"x = 0") + b"class B:\n" + body
        (one,) = diff.parse(
            b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -9,4 +9,4 @@ class B:\n     def f(self):\n         x = 1\n"
            b"-        y = 2\n+        y = 3\n         return x\n"
        )
        assert summary(fit_file(one, old)) is Fit.EXACT
        (moved,) = fit_file(
            one, b"class A:\n" + body + b"class B:\n" + body.replace(b"x = 1", b"x = 5")
        )
        assert moved.fit is Fit.CONFLICT
        assert "class A:" in moved.detail

    def test_carry_puts_moved_hunks_in(self) -> None:
        (one,) = diff.parse(unified("vllm/a.py", A, self.NEW.replace(b"line 3\n", b"")))
        data = b"more\n" + A
        assert carry(fit_file(one, data), data) == b"more\n" + self.NEW.replace(b"line 3\n", b"")
