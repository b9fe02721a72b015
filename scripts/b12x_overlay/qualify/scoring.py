# SPDX-License-Identifier: Apache-2.0
"""Score one answer to a needle task."""

from __future__ import annotations

import json
from typing import Any

from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.needle import CHECKSUM, TOOL, NeedleTask
from b12x_overlay.qualify.schema import NeedleOutcome

Score = tuple[NeedleOutcome, str | None]


def score(answer: dict[str, Any], task: NeedleTask, near: int) -> Score:
    """The outcome of a chat completion and, unless EXACT, why.

    EXACT: one call of the tool with exactly the required whole numbers, all right, and no text beside it.
    NEAR_MISS: facts right, checksum wrong by at most *near*. WRONG_SUM: facts right, checksum further off.
    WRONG_FACTS: a fact is wrong. FAIL: no call, several, another tool, text beside the call, malformed arguments.
    TRUNC: the answer hit its token limit.

    Raises:
        Fault: BAD_BODY where the answer is no chat completion.
    """
    message, finish = _message(answer)
    if finish == "length":
        return NeedleOutcome.TRUNC, "finish_reason length"
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return NeedleOutcome.FAIL, "tool_calls is no list"
    if len(calls) != 1:
        return NeedleOutcome.FAIL, f"{len(calls)} tool calls"
    values, why = _arguments(calls[0], task)
    if values is None:
        return NeedleOutcome.FAIL, why
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return NeedleOutcome.FAIL, "text beside the call"
    wrong = [name for name, value in task.facts.items() if values[name] != value]
    if wrong:
        return NeedleOutcome.WRONG_FACTS, f"wrong: {', '.join(wrong)}"
    off = values[CHECKSUM] - task.checksum
    if off == 0:
        return NeedleOutcome.EXACT, None
    kind = NeedleOutcome.NEAR_MISS if abs(off) <= near else NeedleOutcome.WRONG_SUM
    return kind, f"checksum off by {off:+d}"


def answer_text(answer: dict[str, Any]) -> str:
    """Everything that the model wrote: reasoning, content, and the calls' arguments."""
    message, _ = _message(answer)
    parts = [message.get("reasoning") or message.get("reasoning_content"), message.get("content")]
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append(function.get("arguments"))
    return "".join(part for part in parts if isinstance(part, str))


def _message(answer: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise Fault(FaultKind.BAD_BODY, "the answer has no choices[0].message")
    finish = choice.get("finish_reason") if isinstance(choice, dict) else None
    return message, finish if isinstance(finish, str) else None


def _arguments(call: Any, task: NeedleTask) -> tuple[dict[str, int] | None, str | None]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None, "the call has no function"
    if function.get("name") != TOOL:
        return None, "another tool was called"
    text = function.get("arguments")
    try:
        values = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None, "arguments are not JSON"
    if not isinstance(values, dict):
        return None, "arguments are no object"
    wanted = {*task.facts, CHECKSUM}
    if set(values) != wanted:
        missing, extra = wanted - set(values), set(values) - wanted
        return None, f"{len(missing)} arguments missing, {len(extra)} too many"
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values.values()):
        return None, "an argument is no whole number"
    return values, None
