# SPDX-License-Identifier: Apache-2.0
"""The server's address, and an HTTP transport that can reach nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from b12x_overlay.qualify.errors import UsageError
from b12x_overlay.qualify.faults import Fault, FaultKind


@dataclass(frozen=True)
class Address:
    """A server's base address, without ``/v1``."""

    base: httpx.URL

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``http://host:port``, with or without a path prefix and ``/v1``.

        Raises:
            UsageError: no scheme, another scheme than http(s), no host, credentials, a query.
        """
        text = text.strip()
        if "://" not in text:
            raise UsageError(f"'{text}' is no address: write http://{text or 'HOST:PORT'}")
        try:
            url = httpx.URL(text)
            port = url.port
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"'{text}' is no address: {error}") from error
        if url.scheme not in ("http", "https"):
            raise UsageError(f"'{url.scheme}://' is not supported: use http:// or https://")
        if not url.host:
            raise UsageError(f"'{text}' names no host: write http://HOST:PORT")
        if port is not None and not 0 < port < 65536:
            raise UsageError(f"port {port} is no port: it is between 1 and 65535")
        if re.search(r"[\s%]", url.host):
            raise UsageError(f"'{text}' is no address: '{url.host}' is no host")
        if url.userinfo:
            raise UsageError(
                "leave user and password out of the address; give a key with --api-key-env VARIABLE"
            )
        if url.query or url.fragment:
            raise UsageError("leave '?...' and '#...' out of the address")
        path = url.path.rstrip("/")
        if path.endswith("/v1"):
            path = path.removesuffix("/v1")
        for tail in ("/chat/completions", "/completions", "/models"):
            if path.endswith(tail):
                raise UsageError(f"give the server's base address, without '{url.path}'")
        return cls(url.copy_with(path=path or "/"))

    @property
    def netloc(self) -> str:
        """``host:port`` as it appears in the address."""
        return self.base.netloc.decode()

    def url(self, path: str) -> httpx.URL:
        """The address of *path* (``/v1/models``, with a query if need be) below the base."""
        path, _, query = path.partition("?")
        whole = self.base.copy_with(path=self.base.path.rstrip("/") + path)
        return whole.copy_with(query=query.encode()) if query else whole


class OnlyThisServer(httpx.AsyncHTTPTransport):
    """A transport that refuses every other origin and does not look at proxy variables."""

    def __init__(self, address: Address, *, verify: str | bool, connections: int) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        super().__init__(
            verify=httpx.create_ssl_context(verify=verify, trust_env=False)
            if address.base.scheme == "https"
            else False,
            trust_env=False,
            limits=limits,
        )
        self._origin = (address.base.scheme, address.base.host, address.base.port)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send *request* if it goes to the given server."""
        if (request.url.scheme, request.url.host, request.url.port) != self._origin:
            raise Fault(FaultKind.REDIRECT, "a request to another address was refused")
        return await super().handle_async_request(request)
