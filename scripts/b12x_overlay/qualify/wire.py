# SPDX-License-Identifier: Apache-2.0
"""Reading what an OpenAI-compatible server sends: stream chunks, whole answers, usage statistics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from b12x_overlay.qualify.faults import Fault, FaultKind


@dataclass(frozen=True)
class Usage:
    """Token counts as the server states them; None where it does not."""

    prompt: int | None
    completion: int | None
    cached: int | None


@dataclass(frozen=True)
class Chunk:
    """One event of a stream."""

    at: float
    """time.perf_counter() when it was read."""
    text: str
    """Answer and reasoning text in it."""
    finish: str | None
    usage: Usage | None

    @property
    def has_token(self) -> bool:
        """Whether this event proves that at least one token was generated."""
        return (
            bool(self.text) or self.finish is not None or bool(self.usage and self.usage.completion)
        )


def parse_chunk(data: str, at: float) -> Chunk:
    """Read one event.

    Raises:
        Fault: BROKEN_CHUNK for what is no completion chunk, HTTP_5XX/HTTP_4XX for an error object in the stream.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Fault(FaultKind.BROKEN_CHUNK, f"event is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise Fault(FaultKind.BROKEN_CHUNK, f"event is {type(body).__name__}, not an object")
    if "error" in body:
        raise error_fault(body, 500)
    choices = body.get("choices")
    usage = parse_usage(body.get("usage"))
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Fault(FaultKind.BROKEN_CHUNK, "event has no list 'choices'")
    if not choices:
        return Chunk(at, "", None, usage)
    choice = choices[0]
    delta = choice.get("delta")
    if isinstance(delta, dict):
        parts = [delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content")]
        parts += [_call_text(call) for call in delta.get("tool_calls") or []]
    elif "text" in choice:
        parts = [choice["text"]]
    else:
        raise Fault(FaultKind.BROKEN_CHUNK, "event has neither 'delta' nor 'text'")
    text = "".join(part for part in parts if isinstance(part, str))
    finish = choice.get("finish_reason")
    return Chunk(at, text, finish if isinstance(finish, str) else None, usage)


def parse_usage(value: Any) -> Usage | None:
    """Read a ``usage`` object; None where there is none.

    Raises:
        Fault: WRONG_USAGE for counts that are no whole numbers >= 0.
    """
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt=_count(value.get("prompt_tokens"), "prompt_tokens"),
        completion=_count(value.get("completion_tokens"), "completion_tokens"),
        cached=_count(cached, "cached_tokens"),
    )


def error_fault(body: Any, status: int) -> Fault:
    """The fault that an error answer or error event stands for."""
    error = body.get("error", body) if isinstance(body, dict) else {}
    message = error.get("message") if isinstance(error, dict) else error
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    detail = f"HTTP {status}" + (f": {message}" if isinstance(message, str) and message else "")
    if status == 429:
        return Fault(FaultKind.HTTP_429, detail)
    return Fault(FaultKind.HTTP_4XX if 400 <= status < 500 else FaultKind.HTTP_5XX, detail)


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Fault(FaultKind.WRONG_USAGE, f"{name} is {value!r}, not a count")
    return value


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ""
    return str(function.get("name") or "") + str(function.get("arguments") or "")
