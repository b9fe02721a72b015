# SPDX-License-Identifier: Apache-2.0
"""Image names: ``[registry/]repository[:tag][@sha256:digest]``, with Docker Hub's short forms."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
_REPOSITORY = re.compile(r"^[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*$")
HUB = "docker.io"


class ReferenceError(ValueError):
    """Not an image name; the message says what is wrong."""


@dataclass(frozen=True)
class Reference:
    """One image name, with the parts that were left out filled in."""

    registry: str
    repository: str
    tag: str
    digest: str

    @property
    def full(self) -> str:
        """With registry and tag, without digest: "docker.io/vllm/vllm-openai:v0.33.0"."""
        return f"{self.registry}/{self.repository}" + (f":{self.tag}" if self.tag else "")

    @property
    def local(self) -> bool:
        """Made on this machine ("localhost/name", buildah's and podman's convention): in no registry."""
        return self.registry == "localhost"

    def at(self, digest: str) -> str:
        """The name that means exactly *digest*."""
        return f"{self.registry}/{self.repository}@{digest}"


def parse(text: str) -> Reference:
    """Parse an image name.

    Raises:
        ReferenceError: it is none.
    """
    name, _, digest = text.partition("@")
    if digest and not _DIGEST.match(digest):
        raise ReferenceError(f"{text!r}: a digest is sha256: and 64 hex digits")
    first, slash, rest = name.partition("/")
    registry, path = HUB, name
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, rest
    path, _, tag = path.partition(":")
    if registry == HUB and "/" not in path:
        path = f"library/{path}"
    if not _REPOSITORY.match(path) or (tag and not _TAG.match(tag)):
        raise ReferenceError(f"{text!r} is no image name (registry/repository:tag@sha256:digest)")
    return Reference(registry, path, tag or ("" if digest else "latest"), digest)


def repository(text: str) -> Reference:
    """Parse a name that a tag will be appended to.

    Raises:
        ReferenceError: it is none, or has a tag or a digest already.
    """
    found = parse(text)
    if found.digest or ":" in text.rpartition("/")[2]:
        raise ReferenceError(f"{text!r} has a tag or digest, wanted is a name without one")
    return found


def is_tag(text: str) -> bool:
    """Whether *text* may stand after the colon."""
    return bool(_TAG.match(text))
