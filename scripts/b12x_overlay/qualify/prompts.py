# SPDX-License-Identifier: Apache-2.0
"""Prompts that share nothing with each other, of an exact number of tokens where the server can count.

The same key always gives the same prompt, and another key one that differs from the first word on. `Session.prompt_key`
decides which requests share one: the same repeat in A's and B's blocks, so that both arms see equal texts, each with a
``cache_salt`` of its own; none where the text alone has to keep a prompt cold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.faults import Fault, FaultKind

_WORDS = [
    "harbor",
    "lantern",
    "meadow",
    "copper",
    "winter",
    "signal",
    "garden",
    "bridge",
    "violet",
    "engine",
    "marble",
    "thunder",
    "cotton",
    "island",
    "ladder",
    "pepper",
    "river",
    "saddle",
    "timber",
    "umbrella",
    "velvet",
    "walnut",
    "anchor",
    "basket",
    "candle",
    "desert",
    "ember",
    "falcon",
    "glacier",
    "hammer",
    "ivory",
    "jacket",
    "kettle",
    "lemon",
    "mirror",
    "needle",
    "orchard",
    "pencil",
    "quarry",
    "ribbon",
    "silver",
    "tunnel",
]
_SUBJECTS = (
    "a lighthouse keeper who repairs clocks",
    "how bread is made, from the field to the table",
    "the crossing of a desert by railway",
    "a small town that builds its own telescope",
    "the daily work of a river pilot",
    "the history of a bridge and the people who use it",
    "a botanist who maps an island",
    "how a symphony orchestra prepares a season",
    "a mountain hut in four seasons",
    "the restoration of an old sailing ship",
    "a market where only letters are traded",
    "the work of a watchmaker's apprentice",
    "an expedition under the ice",
    "a library that moves by canal boat",
    "how a village fought a flood",
    "the training of a rescue dog",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt and how its tokens were counted."""

    content: str | list[int]
    """Text, or token ids for the completions interface."""
    tokens: int
    """Prompt tokens; 0 where only the answer's usage statistics can tell."""
    counted_by: Literal["tokenizer", "usage"]


def filler(key: str, words: int) -> str:
    """*words* pseudo-random words in sentences; the first sentence names *key*, so that no two prompts share a start."""
    rng = random.Random(key)
    mark = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=12))
    parts = [f"{mark} is the mark of this text."]
    left = words
    while left > 0:
        count = min(left, rng.randint(6, 14))
        parts.append(" ".join(rng.choices(_WORDS, k=count)).capitalize() + ".")
        left -= count
    return " ".join(parts)


def story(key: str) -> str:
    """A writing task whose natural answer is long; different for every *key*."""
    rng = random.Random(key)
    subject = rng.choice(_SUBJECTS)
    number = rng.randint(1000, 9999)
    return (
        f"Piece {number}. Write a very long, detailed essay about {subject}. Go on as long as you can, in full "
        "paragraphs, never summarise, and never repeat yourself."
    )


async def cold_prompt(
    client: Client, model: str, key: str, length: int, *, tokenizer: bool, ids: bool
) -> Prompt:
    """A prompt of *length* tokens.

    With the server's tokenizer and the completions interface (``ids``) the length is exact and the prompt is a list
    of token ids; with the tokenizer alone the text is cut to at most *length* tokens; with neither, the text is
    sized by a guess and the usage statistics of the answer count.

    Raises:
        Fault: the tokenizer endpoint fails or contradicts itself.
    """
    if not tokenizer:
        return Prompt(filler(key, max(8, int(length / 1.3))), 0, "usage")
    words = max(16, length)
    for _ in range(4):
        text = filler(key, words)
        tokens = await tokenize(client, model, text)
        if len(tokens) >= length:
            break
        words = int(words * max(1.2, 1.1 * length / max(1, len(tokens))))
    else:
        raise Fault(
            FaultKind.WRONG_USAGE, f"the tokenizer makes {len(tokens)} tokens of {words} words"
        )
    if ids:
        return Prompt(tokens[:length], length, "tokenizer")
    for _ in range(4):
        if abs(len(tokens) - length) <= max(4, length // 200):
            break
        words = max(8, int(words * length / len(tokens)))
        text = filler(key, words)
        tokens = await tokenize(client, model, text)
    return Prompt(text, len(tokens), "tokenizer")


async def tokenize(client: Client, model: str, text: str) -> list[int]:
    """The server's token ids of *text* (POST /tokenize).

    Raises:
        Fault: the interface fails, or its count is not the number of its tokens.
    """
    answer = await client.post_json("/tokenize", {"model": model, "prompt": text}, counted=False)
    tokens: Any = answer.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise Fault(FaultKind.BAD_BODY, "/tokenize has no list 'tokens'")
    count = answer.get("count")
    if count is not None and count != len(tokens):
        raise Fault(
            FaultKind.WRONG_USAGE, f"/tokenize counts {count} but lists {len(tokens)} tokens"
        )
    return tokens
