# SPDX-License-Identifier: Apache-2.0
"""Is an answer empty, or does its end repeat itself?"""

from __future__ import annotations

from collections.abc import Sequence

from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.settings import GuardThresholds

TAIL = 8192
"""Characters of an answer's end that are looked at."""

FIRST_TEXT = 16
"""Tokens after which an answer must have shown some text.

Fewer prove nothing: vLLM holds text back while the last tokens may be part of a character (up to four with byte
tokens), of a stop string or of a marker of the reasoning or tool parser, and special tokens have none.
"""


def loop_length(text: str, limits: GuardThresholds) -> int | None:
    """Length in characters of the cycle that *text* ends in, or None.

    A cycle counts when it occurs at least ``loop_cycles`` times in a row at the very end and these cover at least
    ``loop_characters`` characters. Spaces alone count too: a model that prints nothing else is broken.
    """
    tail = text[-TAIL:]
    size = len(tail)
    if size < limits.loop_characters:
        return None
    for period in range(1, size // limits.loop_cycles + 1):
        needed = max(limits.loop_cycles * period, limits.loop_characters)
        if needed > size:
            break
        # A string has period p exactly if it equals itself shifted by p.
        if tail[size - needed + period :] == tail[size - needed : size - period]:
            return period
    return None


def one_unit(text: str, cycles: int) -> bool:
    """Whether *text* but for its spaces is one character or group of characters at least *cycles* times over."""
    seen = "".join(text.split())
    # A string occurs in its double for the second time at the length of its unit.
    period = (seen + seen).find(seen, 1) if seen else 0
    return period > 0 and len(seen) >= cycles * period


def check_answers(texts: Sequence[str], tokens: int, limits: GuardThresholds) -> None:
    """Raise the `Fault` of answers that are too short to be judged one by one, if all of them are degenerate.

    EMPTY: none has visible text; REPETITION: each that has is one unit ``loop_cycles`` times or more. *tokens* is the
    length of all together; with fewer than `FIRST_TEXT` nothing is said.
    """
    if tokens < FIRST_TEXT:
        return
    seen = f"{len(texts)} answers of {tokens} tokens together"
    visible = [text.strip() for text in texts if text.strip()]
    if not visible:
        raise Fault(FaultKind.EMPTY, f"no text in {seen}")
    if all(one_unit(text, limits.loop_cycles) for text in visible):
        raise Fault(FaultKind.REPETITION, f"nothing but repetition in {seen}: {visible[0][:40]!r}")


def check_answer(text: str, tokens: int | None, limits: GuardThresholds) -> None:
    """Raise the `Fault` of a degenerate answer: EMPTY (no visible text) or REPETITION."""
    if not text.strip():
        raise Fault(
            FaultKind.EMPTY,
            f"no text in {tokens if tokens is not None else 'an unknown number of'} tokens",
        )
    period = loop_length(text, limits)
    if period is not None:
        raise Fault(
            FaultKind.REPETITION,
            f"the answer ends in a cycle of {period} characters: {text[-period:][:40]!r}",
        )
