# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault of a fragment is found, at its place, in one run, and valid fragments have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from b12x_overlay.changes.checking import check_entries
from b12x_overlay.changes.model import FIELDS, SECTIONS, Entry
from b12x_overlay.changes.reading import read_folder
from b12x_overlay.changes.schema import SCHEMA_FILE
from b12x_overlay.paths import CHANGES, REPO
from jsonschema import Draft202012Validator
from sync.fragments import encode, entry, fragment


def places(*entries: Entry, component: str = "vllm", **more: Any) -> list[tuple[str, str, str]]:
    report = check_entries(entries, component, **more)
    assert all(fault.what and fault.fix for fault in report.faults)
    return [(fault.file, fault.path, fault.code) for fault in report.faults]


def test_a_valid_fragment_has_no_fault() -> None:
    assert places(entry()) == []
    assert (
        places(
            entry(
                pull_requests=[970, 976],
                authors=None,
                details=["a", "b"],
                evidence=["https://x.org/a?b#c"],
            )
        )
        == []
    )
    assert places(entry(authors=["github-actions[bot]", "a-b", "Some_company", "x"])) == []


@pytest.mark.parametrize(
    ("fields", "path", "code"),
    [
        # (what is written, where the fault is, which)
        ({"summry": "x"}, "$.summry", "unknown-key"),
        ({"summary": None}, "$.summary", "missing"),
        ({"schema": "local-inference-release-change/v2"}, "$.schema", "schema"),
        ({"schema": 1}, "$.schema", "schema"),
        ({"category": "bug"}, "$.category", "category"),
        ({"category": ["fix"]}, "$.category", "category"),  # unhashable: a TypeError in the publisher
        ({"category": True}, "$.category", "category"),
        ({"summary": ""}, "$.summary", "blank"),
        ({"summary": " \t"}, "$.summary", "blank"),
        ({"summary": "a\nb"}, "$.summary", "line-break"),
        ({"summary": "a\rb"}, "$.summary", "line-break"),
        ({"summary": "ends\n"}, "$.summary", "line-break"),
        ({"summary": "a\u2028b"}, "$.summary", "line-break"),
        ({"summary": "a\x0bb"}, "$.summary", "line-break"),
        ({"summary": "a\x1b[31mb"}, "$.summary", "control-character"),
        ({"summary": 7}, "$.summary", "type"),
        ({"models": []}, "$.models", "empty"),  # docker-90.json
        ({"models": "all"}, "$.models", "type"),
        ({"models": ["a", ""]}, "$.models[1]", "blank"),
        ({"models": ["a", "a"]}, "$.models", "duplicate"),
        ({"models": ["a", 1]}, "$.models[1]", "type"),
        ({"compatibility": ""}, "$.compatibility", "blank"),
        ({"compatibility": "a\nb"}, "$.compatibility", "line-break"),
        ({"details": "x"}, "$.details", "type"),
        ({"details": ["x\ny"]}, "$.details[0]", "line-break"),
        ({"details": ["x", "x"]}, "$.details", "duplicate"),
        ({"pull_requests": [True]}, "$.pull_requests[0]", "type"),  # a boolean is no number
        ({"pull_requests": [970.0]}, "$.pull_requests[0]", "type"),
        ({"pull_requests": ["970"]}, "$.pull_requests[0]", "type"),
        ({"pull_requests": [0]}, "$.pull_requests[0]", "minimum"),
        ({"pull_requests": [-1]}, "$.pull_requests[0]", "minimum"),
        ({"pull_requests": [1, 1]}, "$.pull_requests", "duplicate"),
        ({"pull_requests": 970}, "$.pull_requests", "type"),
        ({"authors": None}, "$", "credit"),
        ({"authors": []}, "$", "credit"),
        ({"authors": [], "pull_requests": []}, "$", "credit"),
        ({"authors": ["@octocat"]}, "$.authors[0]", "author-form"),
        ({"authors": ["Mona Lisa"]}, "$.authors[0]", "author-form"),
        ({"authors": ["mona@example.org"]}, "$.authors[0]", "author-form"),
        ({"authors": ["-x"]}, "$.authors[0]", "author-form"),
        ({"authors": ["octocat\n"]}, "$.authors[0]", "author-form"),
        ({"authors": ["octocat", "OctoCat"]}, "$.authors[1]", "duplicate"),
        ({"authors": [None]}, "$.authors[0]", "type"),
        ({"requires": ["vllm_two"]}, "$.requires[0]", "id-form"),
        ({"requires": ["vllm-two"]}, "$.requires[0]", "requires"),
        ({"requires": ["vllm-one"]}, "$.requires", "cycle"),
        ({"requires": {}}, "$.requires", "type"),
        ({"evidence": ["www.example.org"]}, "$.evidence[0]", "url-form"),
        ({"evidence": ["javascript:alert(1)"]}, "$.evidence[0]", "url-form"),
        ({"evidence": ["https://"]}, "$.evidence[0]", "url-form"),
        ({"evidence": ["https://x.org/a b"]}, "$.evidence[0]", "url-form"),
        ({"evidence": ["https://x.org/a", "https://x.org/a"]}, "$.evidence", "duplicate"),
    ],
)  # fmt: skip
def test_fault(fields: dict[str, Any], path: str, code: str) -> None:
    assert places(entry(**fields)) == [("vllm-one.json", path, code)]


@pytest.mark.parametrize(
    "name", ["vllm", "vllm-", "vllm--a", "Vllm-a", "vllm-A", "vllm-a_b", "vllm-ä"]
)
def test_ids_that_are_none(name: str) -> None:
    assert ("x.json", "$.id", "id-form") in places(Entry("x.json", encode(fragment(name))))


def test_every_fault_of_every_file_comes_in_one_run() -> None:
    found = places(
        entry("vllm-a", models=[], pull_requests=[True], summary="x\ny", extra=1),
        entry("vllm-b", category=[], authors=["@x"], evidence=["no"]),
        Entry("vllm-c.json", b"{"),
        Entry("README.md", b"x"),
    )
    assert found == sorted(
        [
            ("vllm-a.json", "$.models", "empty"),
            ("vllm-a.json", "$.pull_requests[0]", "type"),
            ("vllm-a.json", "$.summary", "line-break"),
            ("vllm-a.json", "$.extra", "unknown-key"),
            ("vllm-b.json", "$.category", "category"),
            ("vllm-b.json", "$.authors[0]", "author-form"),
            ("vllm-b.json", "$.evidence[0]", "url-form"),
            ("vllm-c.json", "", "syntax"),
            ("README.md", "", "file-name"),
        ]
    )


@pytest.mark.parametrize(
    ("name", "data", "path", "code"),
    [
        ("vllm-one.json", b"", "", "syntax"),
        ("vllm-one.json", b"[]", "$", "type"),
        ("vllm-one.json", b'"vllm-one"', "$", "type"),
        ("vllm-one.json", b'{"a": NaN}', "", "syntax"),
        ("vllm-one.json", b"[" * 100_000, "", "syntax"),
        ("vllm-one.json", b'{"a": ' + b"9" * 5000 + b"}", "", "syntax"),
        ("vllm-one.json", b'{"a": "\xe4"}', "", "encoding"),
        ("vllm-one.json", b"\xef\xbb\xbf" + encode(fragment()), "", "encoding"),
        ("vllm-one.json", encode(fragment()).replace(b"\n", b"\r\n"), "", "line-endings"),
        ("vllm-one.json", encode(fragment(summary="\ud800")), "$", "encoding"),
        ("vllm-one.json", b'{"id": "x", ' + encode(fragment())[1:], "$.id", "duplicate-key"),
        ("2.featur.md", b"x", "", "file-name"),
        (".gitkeep", b"", "", "file-name"),
        (".vllm-one.json", encode(fragment()), "", "file-name"),
        ("vllm-one.json.orig", encode(fragment()), "", "file-name"),
        ("vllm-one.JSON", encode(fragment()), "", "file-name"),
    ],
)
def test_files_that_are_no_fragments(name: str, data: bytes, path: str, code: str) -> None:
    assert (name, path, code) in places(Entry(name, data))


def test_folders_and_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "vllm-link.json").symlink_to("sub")
    report = check_entries(read_folder(tmp_path), "vllm")
    assert [(fault.file, fault.code) for fault in report.faults] == [
        ("sub", "not-a-file"),
        ("vllm-link.json", "not-a-file"),
    ]


def test_name_and_component_faults() -> None:
    other = Entry("vllm-two.json", encode(fragment("vllm-one")))
    assert places(entry(), other) == [
        ("vllm-one.json", "$.id", "duplicate-id"),
        ("vllm-two.json", "$.id", "id-file"),
        ("vllm-two.json", "$.id", "duplicate-id"),
    ]
    assert places(entry("b12x-checkpoint-shutdown-order")) == [
        ("b12x-checkpoint-shutdown-order.json", "$.id", "component")
    ]
    assert places(entry("b12x-checkpoint-shutdown-order"), component="b12x") == []


def test_requirements_of_other_components_are_external() -> None:
    entries = [
        entry("vllm-a", requires=["vllm-b", "b12x-x"]),
        entry("vllm-b", requires=["b12x-x", "docker-149"]),
    ]
    report = check_entries(entries, "vllm")
    assert report.faults == []
    assert report.external == {"b12x-x": ["vllm-a", "vllm-b"], "docker-149": ["vllm-b"]}


def test_cycles_are_found_once_each_and_long_chains_are_none() -> None:
    chain = [
        entry(f"vllm-c{i}", requires=[f"vllm-c{i + 1}"] if i < 1500 else []) for i in range(1501)
    ]
    assert places(*chain) == []
    ring = [
        entry("vllm-a", requires=["vllm-b"]),
        entry("vllm-b", requires=["vllm-c"]),
        entry("vllm-c", requires=["vllm-a"]),
        entry("vllm-d", requires=["vllm-a"]),
    ]
    report = check_entries(ring, "vllm")
    assert [(fault.file, fault.code) for fault in report.faults] == [("vllm-a.json", "cycle")]
    assert "vllm-a -> vllm-b -> vllm-c -> vllm-a" in report.faults[0].what


def test_patch_set_and_folder_agree() -> None:
    patches = {"one": ["vllm-one"], "bare": [], "lost": ["vllm-on"]}
    report = check_entries(
        [entry(), entry("vllm-sync-20261001")], "vllm", patches=("patchset.toml", patches)
    )
    assert [(fault.path, fault.code) for fault in report.faults] == [
        ("bare", "patch-fragments"),
        ("lost", "patch-fragments"),
    ]
    assert "vllm-one" in report.faults[1].fix


def test_the_schema_file_and_the_code_know_the_same_fields() -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == set(FIELDS)
    assert set(schema["properties"]["category"]["enum"]) == set(SECTIONS)
    assert not SCHEMA_FILE.is_relative_to(CHANGES)


def test_the_schema_file_alone_finds_what_an_editor_should() -> None:
    """Editors use the file without our code: line breaks, handles and addresses must be in it."""
    plain = Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
    assert plain.is_valid(fragment())
    for bad in (
        {"summary": "a\n"},
        {"models": []},
        {"authors": ["@x"]},
        {"evidence": ["x"]},
        {"x": 1},
        {"authors": []},
    ):
        assert not plain.is_valid(fragment(**bad)), bad


def test_editors_are_pointed_to_the_schema() -> None:
    rules = json.loads((REPO / ".vscode" / "settings.json").read_text())["json.schemas"]
    assert [(REPO / rule["url"]).resolve() for rule in rules] == [SCHEMA_FILE.resolve()]
    assert rules[0]["fileMatch"] == ["/changes/*.json"]


@pytest.mark.parametrize(
    "entries",
    [
        # forms that the fork's own fragments have
        [entry("vllm-1016", pull_requests=[1016, 1017], authors=None)],
        [entry("vllm-b12x-master-sync-20261001", category="compatibility", authors=["lukealonso"])],
        [
            entry("vllm-956-csf-canonical", pull_requests=[956]),
            entry("vllm-956-csf-loader", pull_requests=[956]),
        ],
        [
            entry("vllm-813"),
            entry("vllm-813-withdrawal", category="internal", requires=["vllm-813"]),
        ],
        [entry("vllm-986", compatibility="No user action required. VLLM_X=0 disables it")],
        [entry("vllm-970", requires=["b12x-w4a16-a4-prefill-per-call"], models=["GLM-5.3-Flash"])],
    ],
)
def test_what_the_forks_fragments_look_like_is_fine(entries: list[Entry]) -> None:
    assert places(*entries) == []
