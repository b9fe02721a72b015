# SPDX-License-Identifier: Apache-2.0
"""What a fragment, an entry of the folder and a fault are."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

SCHEMA = "local-inference-release-change/v1"
NO_ACTION = "No user action required."
"""The compatibility text that release notes leave out."""

SECTIONS = {
    "breaking": "Required changes",
    "feature": "Features",
    "fix": "Correctness and reliability",
    "performance": "Performance",
    "compatibility": "Compatibility",
    "internal": "Build and maintenance",
}
"""Categories in the order of the release notes, with the titles that the fork's publisher uses."""

FIELDS = (
    "schema", "id", "category", "summary", "models", "compatibility",
    "details", "pull_requests", "authors", "requires", "evidence",
)  # fmt: skip
"""Every key a fragment may have, in the order in which `new` writes them."""


@dataclass(frozen=True)
class Entry:
    """One thing in the folder: *data* is its bytes, None where *kind* says it is no plain file."""

    name: str
    data: bytes | None
    kind: str = "file"

    @property
    def stem(self) -> str:
        return self.name.removesuffix(".json")


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that is wrong: where (file, JSON path), what, and how to put it right."""

    file: str
    path: str
    what: str
    fix: str
    code: str

    def as_json(self) -> dict[str, str]:
        return {
            "file": self.file,
            "path": self.path,
            "code": self.code,
            "what": self.what,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Fragment:
    """A fragment that parsed to a JSON object; *value* may still break the schema."""

    file: str
    data: bytes
    value: dict[str, Any]

    @property
    def stem(self) -> str:
        return self.file.removesuffix(".json")

    @property
    def id(self) -> str:
        found = self.value.get("id")
        return found if isinstance(found, str) else ""

    @property
    def blob(self) -> str:
        return blob_id(self.data)

    def texts(self, key: str) -> list[str]:
        """The strings in list *key*; whatever else is there is the schema's to report."""
        found = self.value.get(key)
        return [item for item in found if isinstance(item, str)] if isinstance(found, list) else []


def blob_id(data: bytes, algorithm: str = "sha1") -> str:
    """git's object id of a file with these bytes; *algorithm* is the repository's object format."""
    return hashlib.new(algorithm, b"blob %d\0" % len(data) + data).hexdigest()


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2028\u2029\u2066-\u2069]")


def plain(text: str) -> str:
    """*text* for one line of a terminal: control, escape and direction characters become visible codes."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
