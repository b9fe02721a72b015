# SPDX-License-Identifier: Apache-2.0
"""Keep hosts, paths, keys and user names out of results.

Whatever free text comes from a server, a file or the environment goes through `redact` before it is stored. As a
second line, `Secrets.clean` is applied to every string of the result and replaces the endpoint's address and the key
literally.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import Any

MAX_TEXT = 240
"""Characters kept of any foreign text."""

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.IGNORECASE)
_KEY = re.compile(
    r"\b(?:sk|hf|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_-]{8,}|\bBearer\s+\S+", re.IGNORECASE
)
_ASSIGNED_KEY = re.compile(
    r"(?i)\b([\w-]*(?:token|secret|password|api[_-]?key))(\s*[=:]\s*)(?!\d+\b)\S+"
)
_PATH = re.compile(
    r"(?<![\w<.])(?:~|\.{1,2})?(?:/[\w.@+:-]+){2,}/?|(?<!\w)[A-Za-z]:\\[^\s\"']+|(?<![\w/])~/[^\s\"']+"
)
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]{2,}\](?::\d+)?|\blocalhost(?::\d+)?\b"
)
_MAIL = re.compile(r"[\w.+-]+@[\w.-]+")


def redact(text: str) -> str:
    """*text* on one line without addresses, paths, keys and mail-like names, cut to `MAX_TEXT` characters."""
    text = " ".join(text.split())
    text = _URL.sub("<url>", text)
    text = _KEY.sub("<key>", text)
    text = _ASSIGNED_KEY.sub(r"\1\2<key>", text)
    text = _MAIL.sub("<name>", text)
    text = _ADDRESS.sub("<address>", text)
    text = _PATH.sub("<path>", text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def model_name(identifier: str) -> str:
    """A served model name without the folder it was loaded from.

    ``org/model`` is kept; an absolute, relative or home path keeps its last part, and a snapshot folder of the
    Hugging Face cache becomes ``org/model``.
    """
    snapshot = re.search(r"models--([\w.-]+?)--([\w.-]+)(?:/|$)", identifier)
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}"
    if (
        "://" in identifier
        or identifier.startswith(("/", "~", ".", "\\"))
        or identifier.count("/") > 1
        or ":\\" in identifier
    ):
        return re.split(r"[/\\]", identifier.rstrip("/\\"))[-1] or "unnamed"
    return redact(identifier)


_PUBLIC_REGISTRIES = ("docker.io", "ghcr.io", "nvcr.io", "quay.io")


def image_name(reference: str) -> str:
    """A container image reference without a private registry's host."""
    first, slash, rest = reference.partition("/")
    if slash and first not in _PUBLIC_REGISTRIES and re.search(r"[.:]|^localhost$", first):
        reference = rest
    return reference if re.fullmatch(r"[\w./:@+-]{1,300}", reference) else redact(reference)


class Secrets:
    """Literal strings that must not be in a result: addresses, keys, and the like."""

    def __init__(self, literals: Iterable[tuple[str, str]]) -> None:
        """*literals*: pairs of the string and what replaces it."""
        self._literals = [(text, mask) for text, mask in literals if len(text) >= 4]

    def clean(self, value: Any, words: Set[str] = frozenset()) -> Any:
        """A JSON value with every literal replaced in its strings.

        Numbers and names of fields stay, and strings that are one of *words*, the result's own vocabulary: a key of
        ``2048`` or a host called ``pass`` must not make the file unreadable.
        """
        if isinstance(value, dict):
            return {name: self.clean(item, words) for name, item in value.items()}
        if isinstance(value, list):
            return [self.clean(item, words) for item in value]
        if not isinstance(value, str) or value in words:
            return value
        for literal, mask in self._literals:
            value = value.replace(literal, mask)
        return value
