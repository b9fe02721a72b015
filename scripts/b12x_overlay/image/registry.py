# SPDX-License-Identifier: Apache-2.0
"""Asks a registry which digests a name has, read-only and anonymously (the OCI distribution API).

Both are wanted: the digest of the multi-platform index that the name points to, and the digest of the one manifest
for the asked platform. Every engine has a command of its own for one half of this, none has it for both.
"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from b12x_overlay.image.reference import HUB, Reference

_ACCEPT = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)
_TIMEOUT = 30
_LIMIT = 8 << 20  # no manifest or config is that large


class RegistryError(RuntimeError):
    """The registry cannot be reached, or has no such image; the message says which."""


class PlatformError(RegistryError):
    """The image exists, but not for the asked architecture."""


@dataclass(frozen=True)
class Resolved:
    """What a name means for one architecture.

    Attributes:
        digest: of the manifest for that architecture.
        index_digest: of the index, "" for a single-platform image.
        config: the image's configuration document (architecture, config, rootfs).
    """

    digest: str
    index_digest: str
    config: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.config.get("config") or {}).get("Labels") or {})


def resolve(reference: Reference, architecture: str) -> Resolved:
    """Look up *reference* for *architecture* ("amd64", "arm64").

    Raises:
        PlatformError: not there for that architecture.
        RegistryError: anything else.
    """
    client = _Client(reference)
    wanted = reference.digest or reference.tag
    digest, document = client.manifest(wanted)
    if reference.digest and digest != reference.digest:
        raise RegistryError(f"{reference.full}: the registry sent {digest} for {reference.digest}")
    index = ""
    if "manifests" in document:
        index = digest
        digest, document = client.manifest(_choose(reference, document, architecture))
    config = json.loads(client.blob(str(document["config"]["digest"])))
    found = str(config.get("architecture", ""))
    if found != architecture:
        raise PlatformError(
            f"{reference.full}@{digest} is for {found}, asked for is {architecture}"
        )
    return Resolved(digest, index, config)


def _choose(reference: Reference, index: dict[str, Any], architecture: str) -> str:
    found = []
    for entry in index["manifests"]:
        platform = entry.get("platform") or {}
        if platform.get("os") == "linux" and platform.get("architecture") == architecture:
            return str(entry["digest"])
        if platform.get("os") != "unknown":  # attestations say unknown/unknown
            found.append(f"{platform.get('os')}/{platform.get('architecture')}")
    raise PlatformError(
        f"{reference.full} has {', '.join(found) or 'no platform'}, not linux/{architecture}"
    )


class _Client:
    def __init__(self, reference: Reference) -> None:
        host = "registry-1.docker.io" if reference.registry == HUB else reference.registry
        plain = host.split(":")[0] in ("localhost", "127.0.0.1")  # as engines treat them
        self._base = f"{'http' if plain else 'https'}://{host}/v2/{reference.repository}"
        self._name = reference.full
        self._token = ""

    def manifest(self, wanted: str) -> tuple[str, dict[str, Any]]:
        """(digest, document) of a tag or digest."""
        data = self._get(f"manifests/{wanted}", _ACCEPT)
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if wanted.startswith("sha256:") and digest != wanted:
            raise RegistryError(f"{self._name}: the registry sent {digest} for {wanted}")
        document = json.loads(data)
        if not isinstance(document, dict) or not {"manifests", "config"} & set(document):
            raise RegistryError(f"{self._name}: {wanted} is no image manifest")
        return digest, document

    def blob(self, digest: str) -> bytes:
        """A small blob, checked against its digest."""
        data = self._get(f"blobs/{digest}", "*/*")
        if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
            raise RegistryError(f"{self._name}: blob {digest} arrived damaged")
        return data

    def _get(self, path: str, accept: str) -> bytes:
        try:
            return self._open(path, accept)
        except urllib.error.HTTPError as error:
            if error.code != 401 or self._token:
                raise RegistryError(
                    f"{self._name}: {error.code} {error.reason} for {path}"
                ) from error
            self._token = self._anonymous_token(error.headers.get("WWW-Authenticate") or "")
            try:
                return self._open(path, accept)
            except urllib.error.URLError as again:
                raise RegistryError(f"{self._name}: {again}") from again
        except (urllib.error.URLError, OSError) as error:
            why = getattr(error, "reason", error)
            raise RegistryError(f"{self._name}: the registry cannot be reached: {why}") from error

    def _open(self, path: str, accept: str) -> bytes:
        request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": accept})
        if self._token:
            # Not carried along to the storage host that a blob redirects to.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            data: bytes = response.read(_LIMIT)
            return data

    def _anonymous_token(self, challenge: str) -> str:
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = fields.pop("realm", "")
        if not challenge.lower().startswith("bearer") or not realm.startswith("https://"):
            raise RegistryError(f"{self._name}: the registry wants a login")
        url = f"{realm}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as response:
                answer = json.loads(response.read(_LIMIT))
        except (OSError, ValueError) as error:
            raise RegistryError(
                f"{self._name}: no anonymous token from {realm}: {error}"
            ) from error
        return str(answer.get("token") or answer.get("access_token") or "")
