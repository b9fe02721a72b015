# SPDX-License-Identifier: Apache-2.0
"""HTTP to one server: every failure ends as a `Fault` of the right kind, nothing is retried in silence."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
from httpx_sse import EventSource, SSEError

from b12x_overlay.qualify.address import Address, OnlyThisServer
from b12x_overlay.qualify.budget import Budget
from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.wire import Chunk, error_fault, parse_chunk

_MAX_BODY = 64 << 20
"""Bytes read of one answer; a server that sends more is broken."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds: for a connection, without any data in a stream, and for a whole request."""

    connect: float = 10.0
    stall: float = 120.0
    request: float = 900.0


class Client:
    """An open connection pool to one server."""

    def __init__(
        self,
        address: Address,
        budget: Budget,
        *,
        key: str | None = None,
        timeouts: Timeouts | None = None,
        ca_file: str | None = None,
        connections: int = 64,
    ) -> None:
        self.address = address
        self.timeouts = timeouts or Timeouts()
        self._budget = budget
        headers = {"user-agent": "b12x-overlay-qualify"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            transport=OnlyThisServer(address, verify=ca_file or True, connections=connections),
            headers=headers,
            timeout=httpx.Timeout(self.timeouts.stall, connect=self.timeouts.connect, pool=None),
            follow_redirects=False,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def get_text(self, path: str, *, timeout: float = 20.0) -> str:
        """GET *path* as text. Raises `Fault`."""
        async with self._guard(timeout):
            response = await self._http.get(self.address.url(path))
            _check_status(response.status_code, response.content)
            return response.text

    async def get_json(self, path: str, *, timeout: float = 20.0) -> dict[str, Any]:
        """GET *path* as a JSON object. Raises `Fault`."""
        return _json_object(await self.get_text(path, timeout=timeout))

    async def post_json(
        self, path: str, body: dict[str, Any], *, counted: bool = True
    ) -> dict[str, Any]:
        """POST *body*, return the JSON object of the answer. Raises `Fault`.

        ``counted``: whether the request counts against the budget (generation does, tokenizing does not).
        """
        if counted:
            self._budget.take()
        async with (
            self._guard(self.timeouts.request, read=self.timeouts.request),
            self._http.stream(
                "POST",
                self.address.url(path),
                json=body,
                timeout=httpx.Timeout(self.timeouts.request, pool=None),
            ) as response,
        ):
            raw = await _read(response)
            _check_status(response.status_code, raw)
            return _json_object(raw.decode("utf-8", "replace"))

    async def stream(
        self, path: str, body: dict[str, Any], on_chunk: Callable[[Chunk], None]
    ) -> None:
        """POST *body* and hand the events of the answer to *on_chunk* until ``[DONE]``.

        Raises:
            Fault: whatever goes wrong, at the event where it does; DISCONNECT where the stream ends early.
        """
        self._budget.take()
        finished = False
        async with (
            self._guard(self.timeouts.request),
            self._http.stream("POST", self.address.url(path), json=body) as response,
        ):
            if response.status_code != 200:
                _check_status(response.status_code, await _read(response))
            try:
                async for event in EventSource(response).aiter_sse():
                    if event.data == "[DONE]":
                        return
                    chunk = parse_chunk(event.data, time.perf_counter())
                    finished = finished or chunk.finish is not None
                    on_chunk(chunk)
            except SSEError as error:
                kind = response.headers.get("content-type", "without content type")
                raise Fault(
                    FaultKind.NOT_A_STREAM, f"the answer is {kind}, not text/event-stream"
                ) from error
        if not finished:
            raise Fault(FaultKind.DISCONNECT, "the stream ended without finish_reason and [DONE]")

    @asynccontextmanager
    async def _guard(self, seconds: float, *, read: float | None = None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise Fault(FaultKind.TIMEOUT, f"no whole answer within {seconds:g} s") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Fault(
                FaultKind.CONNECT, f"no connection: {error or type(error).__name__}"
            ) from error
        except httpx.ReadTimeout as error:
            waited = self.timeouts.stall if read is None else read
            raise Fault(FaultKind.STALL, f"no data for {waited:g} s") from error
        except (
            httpx.RemoteProtocolError,
            httpx.ReadError,
            httpx.WriteError,
            httpx.CloseError,
        ) as error:
            raise Fault(
                FaultKind.DISCONNECT, f"connection lost: {error or type(error).__name__}"
            ) from error
        except httpx.DecodingError as error:
            raise Fault(FaultKind.BAD_BODY, f"undecodable answer: {error}") from error
        except httpx.HTTPError as error:
            raise Fault(FaultKind.DISCONNECT, f"{type(error).__name__}: {error}") from error


async def _read(response: httpx.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MAX_BODY:
            raise Fault(FaultKind.BAD_BODY, f"the answer is larger than {_MAX_BODY >> 20} MiB")
    return b"".join(parts)


def _check_status(status: int, raw: bytes) -> None:
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise Fault(
            FaultKind.REDIRECT,
            f"HTTP {status}: the server points elsewhere; give the final address",
        )
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    raise error_fault(body, status)


def _json_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: nested without end
        raise Fault(FaultKind.BAD_BODY, f"the answer is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise Fault(FaultKind.BAD_BODY, f"the answer is {type(body).__name__}, not an object")
    return body
