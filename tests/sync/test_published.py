# SPDX-License-Identifier: Apache-2.0
"""Published fragments are fixed by their bytes; receipts are read strictly and never rewritten."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from b12x_overlay.changes.checking import check_entries
from b12x_overlay.changes.model import Entry, blob_id
from b12x_overlay.changes.receipts import (
    CHANGELOG_SCHEMA,
    RECEIPT_SCHEMA,
    Receipt,
    read_receipt,
    read_receipts,
)
from b12x_overlay.console import CommandError
from sync.fragments import encode, entry, fragment


def receipt(*entries: Entry) -> Receipt:
    published = {one.stem: blob_id(one.data or b"") for one in entries}
    return Receipt("r1", "2026-11-01T00:00:00Z", published, "r1.json")


def test_blob_ids_are_gits(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x\r\n\0\xff")
    told = subprocess.run(
        ["git", "hash-object", file], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert blob_id(file.read_bytes()) == told


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (lambda data: data.replace(b"works", b"fails"), "published-changed", "edited"),
        (lambda data: json.dumps(json.loads(data)).encode(), "published-changed", "re-formatted"),
        (lambda data: data.rstrip(b"\n"), "published-changed", "re-formatted"),
        (lambda data: None, "published-deleted", "deleted"),
    ],
)
def test_a_published_fragment_may_not_change(change: Any, code: str, word: str) -> None:
    old = entry()
    data = change(old.data)
    now = [] if data is None else [Entry(old.name, data)]
    report = check_entries(now, "vllm", receipt=receipt(old), old_bytes=lambda blob: old.data)
    assert [(fault.file, fault.code) for fault in report.faults] == [("vllm-one.json", code)]
    assert word in report.faults[0].what
    assert (
        "scripts/changes new --id vllm-one-correction --requires vllm-one" in report.faults[0].fix
    )


def test_unchanged_and_added_fragments_are_fine() -> None:
    assert (
        check_entries([entry(), entry("vllm-two")], "vllm", receipt=receipt(entry())).faults == []
    )


def test_a_renamed_published_fragment_counts_as_deleted() -> None:
    report = check_entries([entry("vllm-new")], "vllm", receipt=receipt(entry()))
    assert [fault.code for fault in report.faults] == ["published-deleted"]


def test_faults_that_were_published_are_told_but_cannot_fail_any_more() -> None:
    old = entry(authors=["@octocat"])
    report = check_entries([old], "vllm", receipt=receipt(old))
    assert report.faults == []
    assert [fault.code for fault in report.settled] == ["author-form"]


def test_the_publishers_changelog_is_a_receipt_for_this_component(tmp_path: Path) -> None:
    changes = [
        {"id": "vllm-one", "fragment_blob_sha": blob_id(b"other")},
        {"id": "b12x-x", "fragment_blob_sha": "0" * 40},
    ]
    path = tmp_path / "release-changelog.json"
    path.write_text(
        json.dumps({"schema": CHANGELOG_SCHEMA, "release_channel": "beta", "changes": changes})
    )
    report = check_entries([entry()], "vllm", receipt=read_receipt(path))
    assert [(fault.file, fault.code) for fault in report.faults] == [
        ("vllm-one.json", "published-changed")
    ]


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"schema": RECEIPT_SCHEMA},
        {"schema": RECEIPT_SCHEMA, "release": "a", "published_at": "yesterday", "fragments": {}},
        {
            "schema": RECEIPT_SCHEMA,
            "release": "../a",
            "published_at": "2026-11-01T00:00:00Z",
            "fragments": {},
        },
        {
            "schema": RECEIPT_SCHEMA,
            "release": "a",
            "published_at": "2026-11-01T00:00:00Z",
            "fragments": {"x": "1"},
        },
        {
            "schema": RECEIPT_SCHEMA,
            "release": "a",
            "published_at": "2026-11-01T00:00:00Z",
            "fragments": [],
        },
        {"schema": CHANGELOG_SCHEMA, "changes": [{"id": "vllm-one"}]},
    ],
)
def test_a_broken_receipt_is_never_taken_for_nothing_published(
    tmp_path: Path, document: Any
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(CommandError, match=r"a\.json"):
        read_receipts(tmp_path)


def test_the_last_release_is_the_last_one_published(tmp_path: Path) -> None:
    for name, time in (
        ("z", "2026-10-01T00:00:00Z"),
        ("a", "2026-11-01T00:00:00Z"),
        ("m", "2026-09-01T00:00:00Z"),
    ):
        document = {
            "schema": RECEIPT_SCHEMA,
            "release": name,
            "published_at": time,
            "fragments": {},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert [one.release for one in read_receipts(tmp_path)] == ["m", "z", "a"]
    (tmp_path / "copy.json").write_bytes((tmp_path / "a.json").read_bytes())
    with pytest.raises(CommandError, match="second receipt of a"):
        read_receipts(tmp_path)


def test_encode_is_what_git_stores() -> None:
    assert encode(fragment()).endswith(b"}\n")
