# SPDX-License-Identifier: Apache-2.0
"""Renders release notes as Markdown.

The document is built as markdown-it tokens and written by mdformat's renderer, which escapes whatever a text would
mean in CommonMark. GitHub gives a meaning to more: strike-through, formulas, mentions and issue numbers; those are
neutralised here, so that a summary neither notifies anybody nor links to another repository's issue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdformat.renderer import DEFAULT_RENDERERS, MDRenderer, RenderContext, RenderTreeNode

from b12x_overlay.changes.model import NO_ACTION, SECTIONS, Fragment
from b12x_overlay.changes.notes import Notes

_GITHUB = (
    (re.compile(r"[~$]"), r"\\\g<0>"),  # strike-through, formulas
    (re.compile(r"@(?=[A-Za-z0-9])"), "@<!-- -->"),  # mentions; the comment is not shown
    (re.compile(r"(?<=#)(?=\d)|(?<=\bGH-)(?=\d)", re.IGNORECASE), "<!-- -->"),  # issue numbers
)


class _GitHubText:
    """mdformat's way to replace the rendering of one kind of token."""

    @staticmethod
    def _text(node: RenderTreeNode, context: RenderContext) -> str:
        text = DEFAULT_RENDERERS["text"](node, context)
        for pattern, replacement in _GITHUB:
            text = pattern.sub(replacement, text)
        return text

    RENDERERS: Mapping[str, Any] = {"text": _text}
    POSTPROCESSORS: Mapping[str, Any] = {}


_OPTIONS: Mapping[str, Any] = {
    "mdformat": {"wrap": "keep", "number": False},
    "parser_extension": [_GitHubText],
    "codeformatters": {},
    "store_labels": True,
}


def render(notes: Notes, component: str, repository: str, level: int = 2) -> str:
    """The notes as Markdown, headings from *level* on.

    Args:
        component: shown before pull request numbers.
        repository: web address that pull request numbers belong to; without one they are not linked.
    """
    tokens = [*_heading(level, f"Changes since {notes.since}" if notes.since else "Changes")]
    if not notes.sections:
        tokens += _paragraph([_text("No change is recorded.")])
    for category, fragments in notes.sections:
        tokens += _heading(level + 1, SECTIONS[category])
        items = [_change(fragment, component, repository) for fragment in fragments]
        tokens += _list(items)
    return MDRenderer().render(tokens, _OPTIONS, {})


def count_changes(markdown: str) -> int:
    """How many changes a rendered document shows: the list items of its outermost lists."""
    tokens = MarkdownIt("commonmark").parse(markdown)
    return sum(token.type == "list_item_open" and token.level == 1 for token in tokens)


def _change(fragment: Fragment, component: str, repository: str) -> list[Token]:
    value = fragment.value
    title = [
        _mark("strong", 1),
        _text(value["summary"]),
        _mark("strong", -1),
        *_credit(value, component, repository),
    ]
    lines = [[_text(f"Models: {', '.join(value['models'])}")]]
    if value["compatibility"] != NO_ACTION:
        lines.append([_text(f"Compatibility: {value['compatibility']}")])
    lines += [[_text(detail)] for detail in value.get("details", [])]
    if value.get("evidence"):
        links = _joined(
            [_link(url, str(number)) for number, url in enumerate(value["evidence"], 1)]
        )
        lines.append([_text("Validation evidence: "), *links])
    return [*_paragraph(title), *_list([_paragraph(line) for line in lines])]


def _credit(value: Mapping[str, Any], component: str, repository: str) -> Iterator[Token]:
    parts: list[list[Token]] = []
    for number in value.get("pull_requests", []):
        label = f"{component} #{number}"
        parts.append(
            _link(f"{repository.rstrip('/')}/pull/{number}", label)
            if repository
            else [_text(label)]
        )
    authors = [_link(_profile(author), author) for author in value.get("authors", [])]
    yield _text(" (")
    yield from _joined(parts)
    if authors:
        yield _text("; by " if parts else "by ")
        yield from _joined(authors)
    yield _text(")")


def _profile(author: str) -> str:
    bot = author.removesuffix("[bot]")
    return f"https://github.com/apps/{bot}" if bot != author else f"https://github.com/{author}"


def _joined(parts: list[list[Token]]) -> Iterator[Token]:
    for index, part in enumerate(parts):
        if index:
            yield _text(", ")
        yield from part


def _text(content: str) -> Token:
    # Runs of blanks would be lost or read as code; a line is one line.
    joined = re.sub(r"\s+", " ", content)
    return Token("text", "", 0, content=joined)


def _mark(kind: str, nesting: Any) -> Token:
    name = f"{kind}_open" if nesting == 1 else f"{kind}_close"
    return Token(name, kind, nesting, markup="**" if kind == "strong" else "")


def _link(url: str, label: str) -> list[Token]:
    opening = Token("link_open", "a", 1, attrs={"href": url})
    return [opening, _text(label), Token("link_close", "a", -1)]


def _paragraph(children: list[Token]) -> list[Token]:
    return [
        Token("paragraph_open", "p", 1, block=True),
        Token("inline", "", 0, children=children, block=True),
        Token("paragraph_close", "p", -1, block=True),
    ]


def _heading(level: int, text: str) -> list[Token]:
    return [
        Token("heading_open", f"h{level}", 1, markup="#" * level, block=True),
        Token("inline", "", 0, children=[_text(text)], block=True),
        Token("heading_close", f"h{level}", -1, markup="#" * level, block=True),
    ]


def _list(items: list[list[Token]]) -> list[Token]:
    tokens = [Token("bullet_list_open", "ul", 1, markup="-", block=True)]
    for item in items:
        tokens.append(Token("list_item_open", "li", 1, markup="-", block=True))
        for token in item:
            token.hidden = token.type.startswith(
                "paragraph_"
            )  # a tight list: no blank lines between items
        tokens += [*item, Token("list_item_close", "li", -1, markup="-", block=True)]
    return [*tokens, Token("bullet_list_close", "ul", -1, markup="-", block=True)]
