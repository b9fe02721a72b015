# SPDX-License-Identifier: Apache-2.0
"""Find out what a server offers before anything is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from b12x_overlay.qualify import metrics
from b12x_overlay.qualify.client import Client
from b12x_overlay.qualify.errors import ServerError
from b12x_overlay.qualify.faults import Fault, FaultKind
from b12x_overlay.qualify.prompts import tokenize


@dataclass(frozen=True)
class Abilities:
    """Interfaces that answered as documented."""

    completions: bool
    chat: bool
    extras: bool
    """vLLM's request fields: cache_salt, ignore_eos, continuous usage statistics."""
    tokenizer: bool
    metrics: bool
    speculates: bool

    def as_dict(self) -> dict[str, bool]:
        """For the result."""
        return asdict(self)


@dataclass(frozen=True)
class Server:
    """A reachable server and the model under test."""

    model: str
    max_model_len: int | None
    abilities: Abilities


async def probe(client: Client, model: str | None) -> Server:
    """Ask for models and try each interface once with one token.

    Raises:
        ServerError: not reachable, no or several models, neither interface for text.
        BudgetSpentError: the request limit does not even cover this.
    """
    name, limit = await _choose_model(client, model)
    extras = True
    tries: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "The"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say yes."}]}),
    ]
    found: dict[str, bool] = {}
    errors: list[str] = []
    for path, body in tries:
        found[path] = False
        for with_extras in (True, False):
            try:
                await _one_token(
                    client,
                    path,
                    {"model": name, "max_tokens": 1, "temperature": 0, **body},
                    with_extras,
                )
            except Fault as fault:
                if fault.kind in (FaultKind.HTTP_4XX,) and with_extras:
                    continue
                errors.append(f"{path}: {fault}")
                break
            found[path] = True
            extras = extras and with_extras
            break
    completions, chat = found["/v1/completions"], found["/v1/chat/completions"]
    if not completions and not chat:
        raise ServerError("the server generates no text:\n  " + "\n  ".join(errors))
    counters = await metrics.try_scrape(client, available=True)
    return Server(
        name,
        limit,
        Abilities(
            completions=completions,
            chat=chat,
            extras=extras,
            tokenizer=await _works(tokenize(client, name, "one two three")),
            metrics=counters is not None and counters.generated is not None,
            speculates=counters is not None and counters.drafts is not None,
        ),
    )


async def _choose_model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    try:
        listing = await client.get_json("/v1/models")
    except Fault as fault:
        hint = {
            FaultKind.CONNECT: "Is it running, and is the address right, http or https?",
            FaultKind.HTTP_4XX: "If it wants a key: --api-key-env VARIABLE.",
        }.get(fault.kind, "Is this an OpenAI-compatible server?")
        if "CERTIFICATE" in str(fault):
            hint = (
                "Give the name that its certificate is for, and with --ca-file FILE the authority that signed it "
                "(a self-signed certificate is its own)."
            )
        raise ServerError(f"no list of models at /v1/models: {fault}. {hint}") from fault
    entries = listing.get("data")
    cards = (
        [card for card in entries if isinstance(card, dict)] if isinstance(entries, list) else []
    )
    names = [card["id"] for card in cards if isinstance(card.get("id"), str)]
    if not names:
        raise ServerError("the server lists no model at /v1/models")
    if wanted is None and len(names) > 1:
        raise ServerError(
            f"the server has several models; choose one with --model: {', '.join(names)}"
        )
    if wanted is not None and wanted not in names:
        raise ServerError(f"the server has no model '{wanted}'; it has: {', '.join(names)}")
    name = wanted or names[0]
    limit = next(card.get("max_model_len") for card in cards if card.get("id") == name)
    return name, limit if isinstance(limit, int) else None


async def _one_token(client: Client, path: str, body: dict[str, Any], extras: bool) -> None:
    if extras:
        body = {**body, "cache_salt": "probe", "ignore_eos": True}
    answer = await client.post_json(path, body)
    if not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise Fault(FaultKind.BAD_BODY, "the answer has no choices")


async def _works(attempt: Any) -> bool:
    try:
        await attempt
    except Fault:
        return False
    return True
