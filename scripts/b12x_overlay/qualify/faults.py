# SPDX-License-Identifier: Apache-2.0
"""The ways in which a request can go wrong, each under its own name.

A measurement never hides a fault behind an average: a request ends either well or in one `Fault`, and the report
counts them per kind.
"""

from __future__ import annotations

from enum import StrEnum

from b12x_overlay.qualify.redact import redact


class FaultKind(StrEnum):
    """What went wrong with one request or one window."""

    CONNECT = "connect"
    """No connection: refused, unknown host, TLS failure."""
    TIMEOUT = "timeout"
    """The whole request took longer than --request-timeout."""
    STALL = "stall"
    """The stream sent nothing for --stall-timeout seconds."""
    DISCONNECT = "disconnect"
    """The connection closed before the answer was whole."""
    BROKEN_CHUNK = "broken_chunk"
    """A stream event is not JSON, or not a completion object."""
    NOT_A_STREAM = "not_a_stream"
    """A streaming request was answered with something that is no event stream."""
    BAD_BODY = "bad_body"
    """An answer is not the JSON object that the interface promises."""
    REDIRECT = "redirect"
    """The server points to another address; it is not followed."""
    HTTP_429 = "http_429"
    """Too many requests."""
    HTTP_4XX = "http_4xx"
    """Another client error: the server refuses the request as sent."""
    HTTP_5XX = "http_5xx"
    """A server error, as status or as an error object inside the stream."""
    NO_USAGE = "no_usage"
    """The usage statistics that tokens are counted from are missing."""
    WRONG_USAGE = "wrong_usage"
    """Usage statistics contradict the tokenizer, the request, each other or the server's counters."""
    CACHED = "cached"
    """A prompt that must be cold came partly from the prefix cache."""
    EMPTY = "empty"
    """An answer without text and without a tool call."""
    REPETITION = "repetition"
    """An answer whose end is one cycle over and over."""
    TRUNCATED = "truncated"
    """An answer that ended before it was whole."""
    NOT_SATURATED = "not_saturated"
    """Fewer streams ran than asked: the server's limit is lower, or it is busy."""


DEGENERATION = frozenset({FaultKind.EMPTY, FaultKind.REPETITION, FaultKind.TRUNCATED})
"""The kinds that speak of the model's answer, not of the connection or the numbers."""


class Fault(Exception):  # noqa: N818 (it is an outcome to count more than an error)
    """One request failed. ``detail`` is redacted: it may go into a report."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        self.kind = kind
        self.detail = redact(detail)
        super().__init__(f"{kind.value}: {self.detail}")


class BudgetSpentError(Exception):
    """The run's limit of requests or minutes is reached; what was measured is kept."""
