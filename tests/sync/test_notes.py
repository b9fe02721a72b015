# SPDX-License-Identifier: Apache-2.0
"""Release notes: order, count, and texts that mean in Markdown what they say."""

from __future__ import annotations

import re
from typing import Any

from b12x_overlay.changes.markdown import count_changes, render
from b12x_overlay.changes.model import SECTIONS, Fragment
from b12x_overlay.changes.notes import as_json, select
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from sync.fragments import encode, fragment

TRAPS = [
    "# no heading", "- no item", "+ no item", "12. no number", "> no quote", "***", "---", "===", "```", "~~~",
    "*a* _b_ **c** __d__ `e` ~~f~~ ~g~", "[a](b) ![a](b) [a]: b <b>c</b> <!-- d --> <https://e>", "&amp; &#35; \\ \\*",
    "a | b", "$x$ and $$y$$", "@octocat and #123 and GH-5 and o/r#7", "snake_case_name and __init__", "tail\\",
    "[ ] task", "1) one", "a<br>b", "<details>", "http://x.org/_a_", "\U0001f600 ß \u200bz",
]  # fmt: skip


def made(name: str, **fields: Any) -> Fragment:
    value = fragment(name, **fields)
    return Fragment(f"{name}.json", encode(value), value)


def texts(markdown: str) -> list[str]:
    """What a reader of the rendered document sees, a string for each block."""
    parser = MarkdownIt("commonmark").enable(["strikethrough", "table"])
    seen = []
    for token in parser.parse(markdown):
        assert token.type not in (
            "html_block",
            "fence",
            "code_block",
            "hr",
            "blockquote_open",
            "table_open",
        ), token
        if token.type == "inline":
            text = ""
            for child in token.children or []:
                assert child.type in (
                    "text", "text_special", "strong_open", "strong_close", "link_open", "link_close", "html_inline",
                ), child  # fmt: skip
                assert child.type != "html_inline" or child.content == "<!-- -->", child
                text += "" if child.type == "html_inline" else child.content
            seen.append(text)
    return seen


def rendered(summary: str) -> str:
    one = made(
        "vllm-one", summary=summary, models=[summary], compatibility=summary, details=[summary]
    )
    return render(select([one], {}), "vllm", "")


def assert_safe(text: str) -> None:
    markdown = rendered(text)
    shown = re.sub(r"\s+", " ", text)
    assert texts(markdown)[2:] == [
        f"{shown} (by octocat)", f"Models: {shown}".rstrip(), f"Compatibility: {shown}".rstrip(), shown.strip(),
    ], markdown  # fmt: skip
    assert count_changes(markdown) == 1
    for bare in re.findall(r"(?<!\\)[$~]|@(?=[A-Za-z0-9])|#(?=\d)", markdown):
        raise AssertionError(f"{bare} means something on GitHub: {markdown}")


def test_texts_keep_their_meaning() -> None:
    for text in TRAPS:
        assert_safe(text)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=40))
def test_any_text_keeps_its_meaning(text: str) -> None:
    if text.strip():
        assert_safe(text.strip())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(list("*_`~[]()<>!#-+|\\&@$ ab1.:=\"'{}/^")), min_size=1, max_size=20)
)
def test_any_markup_keeps_its_meaning(parts: list[str]) -> None:
    text = "".join(parts).strip()
    if text:
        assert_safe(text)


def test_sections_in_order_and_by_id() -> None:
    fragments = [
        made(f"vllm-{category}-{i}", category=category)
        for i in (2, 1)
        for category in reversed(SECTIONS)
    ]
    notes = select(fragments, {})
    assert [category for category, _ in notes.sections] == [
        "breaking", "feature", "fix", "performance", "compatibility", "internal",
    ]  # fmt: skip
    assert [one.id for one in notes.fragments] == [
        f"vllm-{category}-{i}" for category in SECTIONS for i in (1, 2)
    ]
    markdown = render(notes, "vllm", "https://example.org/r")
    assert count_changes(markdown) == as_json(notes)["count"] == len(fragments)
    assert markdown == render(
        select(list(reversed(fragments)), {}), "vllm", "https://example.org/r"
    )


def test_only_what_is_new_since_the_release() -> None:
    old, new = made("vllm-old"), made("vllm-new")
    notes = select([old, new], {"vllm-old": old.blob}, "r1")
    assert [one.id for one in notes.fragments] == ["vllm-new"]
    assert "## Changes since r1" in render(notes, "vllm", "")
    nothing = render(select([old], {"vllm-old": old.blob}, "r1"), "vllm", "")
    assert "No change is recorded." in nothing
    assert count_changes(nothing) == 0


def test_credits_links_and_the_nothing_to_do_text() -> None:
    one = made(
        "vllm-one", pull_requests=[1016, 1017], authors=["octocat", "dependabot[bot]"], evidence=["https://x.org/a_(b)"],
        compatibility="No user action required.",
    )  # fmt: skip
    two = made("vllm-two", compatibility="No user action required. VLLM_X=0 turns it off.")
    markdown = render(select([one, two], {}), "vllm", "https://example.org/r/")
    assert "[vllm #<!-- -->1016](https://example.org/r/pull/1016), [vllm #<!-- -->1017]" in markdown
    assert "; by [octocat](https://github.com/octocat)" in markdown
    assert "https://github.com/apps/dependabot)" in markdown
    assert markdown.count("Compatibility:") == 1
    parsed = MarkdownIt("commonmark").parse(markdown)
    links = [
        child.attrs["href"]
        for token in parsed
        for child in token.children or []
        if child.type == "link_open"
    ]
    assert "https://x.org/a_(b)" in links
