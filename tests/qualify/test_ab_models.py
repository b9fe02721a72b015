# SPDX-License-Identifier: Apache-2.0
"""An A/B of servers with different models says so, as a comparison of two results does."""

from __future__ import annotations

from qualify.fake_server import serving

QUICK = ["--only", "prefill"]


def test_different_models_are_noted_once_in_the_result_and_both_reports(qualify):
    note = "different models: org/tiny and org/small"
    with serving() as a, serving(model="org/small") as b:
        stopped = qualify("ab", a.url, b.url, *QUICK, "--max-requests", "12")
        assert stopped.result["status"] == "partial"
        assert note in stopped.err
        done = qualify("ab", a.url, b.url, *QUICK)
    assert done.result["status"] == "complete"
    assert done.result["notes"] == [note]
    for name in ("report.md", "report.html"):
        assert (done.folder / name).read_text().count(note) == 1


def test_equal_models_need_no_note(qualify):
    with serving() as a, serving() as b:
        done = qualify("ab", a.url, b.url, *QUICK)
    assert done.result["notes"] == []
