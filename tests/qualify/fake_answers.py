# SPDX-License-Identifier: Apache-2.0
"""What the scripted server says: text, usage statistics, refusals and tool calls, right or wrong in one named way."""

from __future__ import annotations

import json
import re
from typing import Any

from aiohttp import web

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "brew",
    "potent",
    "coffee",
]


def tokens_of(text: str) -> list[int]:
    """One token per word or sign."""
    return [len(word) for word in re.findall(r"\w+|[^\w\s]", text)]


def usage(prompt: int, done: int, fault: str | None = None) -> dict[str, Any]:
    if fault == "usage_prompt":
        prompt += 7
    if fault == "usage_back":
        done = 5 if done % 2 else 3
    if fault == "usage_half":
        done //= 2
    if fault == "usage_too_many":
        done += 100_000
    stated: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": done}
    if fault == "usage_text":
        stated["completion_tokens"] = "many"
    if fault == "cached":
        stated["prompt_tokens_details"] = {"cached_tokens": 16}
    return stated


def words(fault: str | None, done: int, count: int) -> str:
    if fault == "repetition":
        return "!" * 8 * count
    if fault == "empty":
        return ""
    if fault == "blank":
        return "\n" * count
    if fault == "late_text" and done <= 12:
        return ""
    return "".join(f" {WORDS[(k * k + k // 7) % len(WORDS)]}{k}" for k in range(done, done + count))


def refuse(fault: str | None, key: str | None) -> web.Response | None:
    if fault in ("http_429", "http_500", "http_400"):
        status = int(fault[-3:])
        error = {
            "error": {
                "message": f"refused at http://10.1.2.3:8000/{status} for {key}",
                "code": status,
            }
        }
        return web.json_response(error, status=status)
    if fault == "html_500":
        return web.Response(text="<html>oops</html>", status=500, content_type="text/html")
    if fault == "redirect":
        return web.Response(status=307, headers={"location": "http://192.0.2.1/elsewhere"})
    if fault == "not_a_stream":
        return web.json_response({"choices": [{"text": "all at once"}]})
    return None


def needle_choice(kind: str, tool: str, values: dict[str, Any]) -> dict[str, Any]:
    """One answer of the given kind."""
    values = dict(values)
    first = next(iter(values))
    if kind == "near":
        values["checksum"] -= 2
    if kind == "wrong_sum":
        values["checksum"] += 50
    if kind == "wrong_facts":
        values[first] += 1
    if kind == "text_number":
        values["checksum"] = str(values["checksum"])
    if kind == "extra":
        values["more"] = 1
    call = {"type": "function", "function": {"name": tool, "arguments": json.dumps(values)}}
    if kind == "malformed":
        call["function"]["arguments"] = call["function"]["arguments"][:-1]
    if kind == "deep":
        call["function"]["arguments"] = "[" * 100_000
    if kind == "other_tool":
        call["function"]["name"] = "another"
    message: dict[str, Any] = {"content": None, "tool_calls": [call]}
    finish = "tool_calls"
    if kind == "two_calls":
        message["tool_calls"] = [call, call]
    if kind == "prose":
        message = {"content": f"The checksum is {values['checksum']}.", "tool_calls": []}
    if kind == "beside":
        message["content"] = "Here you are."
    if kind == "trunc":
        message, finish = {"content": "Let me think", "tool_calls": []}, "length"
    if kind == "empty":
        message, finish = {"content": "", "tool_calls": []}, "stop"
    if kind == "loop":
        message, finish = {"content": "so so " * 300, "tool_calls": []}, "stop"
    return {"index": 0, "message": message, "finish_reason": finish}
