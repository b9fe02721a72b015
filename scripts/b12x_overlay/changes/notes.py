# SPDX-License-Identifier: Apache-2.0
"""Release notes: which fragments are new since a release, in the order of the sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from b12x_overlay.changes.model import FIELDS, SECTIONS, Fragment

NOTES_SCHEMA = "b12x-overlay-release-notes/v1"


@dataclass(frozen=True)
class Notes:
    """The new fragments, each in its section; *since* is the earlier release's name or ''."""

    since: str
    sections: tuple[tuple[str, tuple[Fragment, ...]], ...]

    @property
    def fragments(self) -> list[Fragment]:
        return [fragment for _, fragments in self.sections for fragment in fragments]


def select(fragments: Sequence[Fragment], published: Mapping[str, str], since: str = "") -> Notes:
    """The fragments that *published* (id to blob id) lacks, by category and then id."""
    new = sorted((one for one in fragments if one.id not in published), key=lambda one: one.id)
    sections = (
        (category, tuple(one for one in new if one.value["category"] == category))
        for category in SECTIONS
    )
    return Notes(since, tuple((category, found) for category, found in sections if found))


def as_json(notes: Notes) -> dict[str, Any]:
    """The notes as a JSON document; each change is its fragment's fields plus the blob id of its file."""
    return {
        "schema": NOTES_SCHEMA,
        "since": notes.since or None,
        "count": len(notes.fragments),
        "sections": [
            {
                "category": category,
                "title": SECTIONS[category],
                "changes": [
                    {
                        **{key: one.value[key] for key in FIELDS if key in one.value},
                        "blob": one.blob,
                    }
                    for one in fragments
                ],
            }
            for category, fragments in notes.sections
        ],
    }
