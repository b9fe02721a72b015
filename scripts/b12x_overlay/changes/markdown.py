# SPDX-License-Identifier: Apache-2.0
"""Renders release notes as Markdown.

The document is built as markdown-it tokens and written by mdformat's renderer, which escapes whatever a text would
mean in CommonMark. GitHub gives a meaning to more: strike-through, formulas, mentions and issue numbers; those are
neutralised here, so that a summary neither notifies anybody nor links to another repository's issue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
    tokens = [*heading(level, f"Changes since {notes.since}" if notes.since else "Changes")]
    if not notes.sections:
        tokens += paragraph([text("No change is recorded.")])
    for category, fragments in notes.sections:
        tokens += heading(level + 1, SECTIONS[category])
        items = [_change(fragment, component, repository) for fragment in fragments]
        tokens += bullets(items)
    return to_markdown(tokens)


def to_markdown(tokens: list[Token]) -> str:
    """The Markdown of a document made of the building blocks below."""
    return MDRenderer().render(tokens, _OPTIONS, {})


def count_changes(markdown: str) -> int:
    """How many changes a rendered document shows: the list items of its outermost lists."""
    tokens = MarkdownIt("commonmark").parse(markdown)
    return sum(token.type == "list_item_open" and token.level == 1 for token in tokens)


def _change(fragment: Fragment, component: str, repository: str) -> list[Token]:
    value = fragment.value
    title = [
        _mark("strong", 1),
        text(value["summary"]),
        _mark("strong", -1),
        *_credit(value, component, repository),
    ]
    lines = [[text(f"Models: {', '.join(value['models'])}")]]
    if value["compatibility"] != NO_ACTION:
        lines.append([text(f"Compatibility: {value['compatibility']}")])
    lines += [[text(detail)] for detail in value.get("details", [])]
    if value.get("evidence"):
        links = _joined(
            [_link(url, str(number)) for number, url in enumerate(value["evidence"], 1)]
        )
        lines.append([text("Validation evidence: "), *links])
    return [*paragraph(title), *bullets([paragraph(line) for line in lines])]


def _credit(value: Mapping[str, Any], component: str, repository: str) -> Iterator[Token]:
    parts: list[list[Token]] = []
    for number in value.get("pull_requests", []):
        label = f"{component} #{number}"
        parts.append(
            _link(f"{repository.rstrip('/')}/pull/{number}", label) if repository else [text(label)]
        )
    authors = [_link(_profile(author), author) for author in value.get("authors", [])]
    yield text(" (")
    yield from _joined(parts)
    if authors:
        yield text("; by " if parts else "by ")
        yield from _joined(authors)
    yield text(")")


def _profile(author: str) -> str:
    bot = author.removesuffix("[bot]")
    return f"https://github.com/apps/{bot}" if bot != author else f"https://github.com/{author}"


def _joined(parts: list[list[Token]]) -> Iterator[Token]:
    for index, part in enumerate(parts):
        if index:
            yield text(", ")
        yield from part


def text(content: str) -> Token:
    """Plain text on one line; runs of blanks, which Markdown would drop, become one."""
    joined = re.sub(r"\s+", " ", content)
    return Token("text", "", 0, content=joined)


def _mark(kind: str, nesting: Any) -> Token:
    name = f"{kind}_open" if nesting == 1 else f"{kind}_close"
    return Token(name, kind, nesting, markup="**" if kind == "strong" else "")


def _link(url: str, label: str) -> list[Token]:
    opening = Token("link_open", "a", 1, attrs={"href": url})
    return [opening, text(label), Token("link_close", "a", -1)]


def paragraph(children: list[Token]) -> list[Token]:
    """A paragraph of texts and links."""
    return [
        Token("paragraph_open", "p", 1, block=True),
        Token("inline", "", 0, children=children, block=True),
        Token("paragraph_close", "p", -1, block=True),
    ]


def heading(level: int, title: str) -> list[Token]:
    """A heading; *level* from 1 on."""
    return [
        Token("heading_open", f"h{level}", 1, markup="#" * level, block=True),
        Token("inline", "", 0, children=[text(title)], block=True),
        Token("heading_close", f"h{level}", -1, markup="#" * level, block=True),
    ]


def bullets(items: list[list[Token]]) -> list[Token]:
    """A list; each item is made of paragraphs and lists."""
    tokens = [Token("bullet_list_open", "ul", 1, markup="-", block=True)]
    for item in items:
        tokens.append(Token("list_item_open", "li", 1, markup="-", block=True))
        for token in item:  # a tight list: no blank lines between items
            token.hidden = token.type.startswith("paragraph_")
        tokens += [*item, Token("list_item_close", "li", -1, markup="-", block=True)]
    return [*tokens, Token("bullet_list_close", "ul", -1, markup="-", block=True)]


def code(lines: Iterable[str]) -> list[Token]:
    """A block of lines shown as they are."""
    return [
        Token("code_block", "code", 0, content="".join(f"{line}\n" for line in lines), block=True)
    ]
