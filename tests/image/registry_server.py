# SPDX-License-Identifier: Apache-2.0
"""A registry on this machine with one image: real HTTP, the read half of the OCI distribution API."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Store:
    """Blobs and manifests by digest, tags by name."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}

    def add(self, kind: str, document: Any) -> str:
        data = json.dumps(document).encode()
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.objects[digest] = (kind, data)
        return digest

    def image(self, architecture: str, labels: dict[str, str] | None = None) -> str:
        """Add an image without layers; returns its manifest's digest."""
        config = self.add(
            "blob", {"os": "linux", "architecture": architecture, "config": {"Labels": labels}}
        )
        entry = {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": config,
            "size": 1,
        }
        return self.add(
            MANIFEST, {"schemaVersion": 2, "mediaType": MANIFEST, "config": entry, "layers": []}
        )

    def index(self, **platforms: str) -> str:
        """Add an index {architecture: manifest digest}, with an attestation as buildx adds one."""
        entries = [
            {"digest": digest, "platform": {"os": "linux", "architecture": name}}
            for name, digest in platforms.items()
        ]
        entries.append(
            {
                "digest": "sha256:" + "0" * 64,
                "platform": {"os": "unknown", "architecture": "unknown"},
            }
        )
        return self.add(INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})


@contextmanager
def serve(store: Store) -> Iterator[str]:
    """Serve *store*; gives "localhost:PORT"."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            kind, data = store.objects.get(store.tags.get(name, name), ("", b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"localhost:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
