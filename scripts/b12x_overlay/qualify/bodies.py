# SPDX-License-Identifier: Apache-2.0
"""Request bodies for the measurements."""

from __future__ import annotations

from typing import Any

from b12x_overlay.qualify.probe import Server

_USAGE = {"include_usage": True, "continuous_usage_stats": True}


def generation(
    server: Server,
    content: str | list[int],
    *,
    chat: bool,
    max_tokens: int,
    temperature: float,
    seed: int,
    salt: str,
    ignore_eos: bool,
) -> tuple[str, dict[str, Any]]:
    """Path and body of one streaming request for at most *max_tokens* tokens.

    *content* is text, or token ids (completions only). ``ignore_eos`` keeps an answer from ending early, ``salt``
    keeps its prompt apart from every other prompt in the prefix cache; both only where the server knows them.
    """
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": dict(_USAGE) if server.abilities.extras else {"include_usage": True},
    }
    if server.abilities.extras:
        body |= {"cache_salt": salt, "ignore_eos": ignore_eos}
    if chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]}
    return "/v1/completions", {**body, "prompt": content}
