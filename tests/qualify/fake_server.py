# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible server that does what a test's script says, in a thread or as a process of its own.

It answers like vLLM 0.33.0 where it behaves, including usage statistics and Prometheus counters that agree with what
it sent, and misbehaves in exactly one named way where it is told to. As a process: ``python fake_server.py PORT``; the
environment variable FAKE_SPEED sets tokens per second, FAKE_A4 adds A4 counters, FAKE_LINGER goes on serving for so many
seconds after SIGTERM, FAKE_REFUSES answers every stream with an error that repeats its value.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

if __name__ == "__main__":  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from qualify.fake_answers import needle_choice, refuse, tokens_of, usage, words

FACT = re.compile(r"^NOTE the certified reading of (\w+) is (\d+)\.$", re.MULTILINE)


@dataclass
class Script:
    """How the server behaves. A fault applies to request numbers in ``faulty`` (None: to all)."""

    model: str = "org/tiny"
    models: list[str] | None = None
    max_model_len: int = 100_000
    fault: str | None = None
    needle: str = "exact"
    faulty: set[int] | None = None
    where: str = "both"
    """completions, chat or both: which interface has the fault."""
    tokenizer: bool = True
    metrics: bool = True
    completions: bool = True
    extras: bool = True
    prefill_tok_s: float = 200_000.0
    decode_tok_s: float = 400.0
    """Per stream."""
    accepted: int = 0
    """Draft tokens accepted per step; 0: no speculative decoding."""
    max_streams: int = 10_000
    lost_slots: int = 0
    """How many of the max_streams are gone for good after the first answers."""
    foreign_tokens_s: float = 0.0
    """Tokens per second that another client gets."""
    foreign_running: int = 0
    """Added to the gauge of running requests, once foreign_from of our streams have begun."""
    foreign_from: int = 0
    foreign_waiting: int = 0
    """Added to the gauge of waiting requests."""
    foreign_prompt: int = 0
    """Prompt tokens of another client with each of our requests."""
    prefix_cache: str | None = None
    """What a cached prompt is known by: "salt" (and the prompt) or "prompt" alone; it then takes no time."""
    cached_share: float = 0.0
    """Share of every prompt that the counter of cached prompt tokens grows by."""
    first_slow: float = 1.0
    """How many times longer the first stream's prompt takes."""
    slow_until: float = 0.0
    """Seconds from the first stream in which answers come at a twentieth of the speed."""
    linger: float = 0.0
    """Seconds for which a stream whose client has gone still runs."""
    terminate: set[int] = field(default_factory=set)
    """During which streams (1, 2, …) this process is told to end."""
    draft_every: int = 1
    """Only every so many steps of a stream drafts and accepts."""
    a4_rows: bool | None = None
    """None: no such counter; False: it stays 0; True: it grows with prompts."""
    key: str | None = None
    version: str = "0.33.0"
    refuses: str | None = None
    """Every stream is refused with this word."""
    unwell: frozenset[int] = frozenset()
    """Which requests for the list of models (1, 2, …) are answered 503."""


@dataclass
class Seen:
    """What the server was asked."""

    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    lingering: int = 0
    lingering_at_start: list[int] = field(default_factory=list)
    """For every stream: requests whose client had gone and that still ran."""
    started_at: list[float] = field(default_factory=list)
    """time.monotonic() of every stream."""
    cached: int = 0
    most_running: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    steps: float = 0
    drafts: int = 0
    accepted: int = 0
    authorizations: list[str | None] = field(default_factory=list)


class FakeServer:
    """Use as a context manager; ``url`` is its address."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.script = script or Script()
        self.port = port
        self.seen = Seen()
        self.started = time.time()
        self._begun = time.monotonic()
        self._number = itertools.count()
        self._asked_models = 0
        self._ready = threading.Event()
        self._known: set[tuple[Any, ...]] = set()
        self._lost = 0
        self._slots = asyncio.Semaphore(self.script.max_streams)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def app(self) -> web.Application:
        application = web.Application(client_max_size=1 << 28, middlewares=[self._log])
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/version", self._version)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_post("/tokenize", self._tokenize)
        application.router.add_post("/v1/completions", self._completions)
        application.router.add_post("/v1/chat/completions", self._chat)
        return application

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def begin() -> web.AppRunner:
            runner = web.AppRunner(
                self.app(), shutdown_timeout=0.1, handler_cancellation=True, access_log=None
            )
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self.port)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            return runner

        runner = self._loop.run_until_complete(begin())
        self._ready.set()
        self._loop.run_forever()
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(runner.cleanup())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with contextlib.suppress(Exception):
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    @web.middleware
    async def _log(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen.paths.append(request.path)
        self.seen.authorizations.append(request.headers.get("authorization"))
        key = self.script.key
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "bad key", "code": 401}}, status=401)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        self._asked_models += 1
        if self._asked_models in self.script.unwell:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        if self.script.fault == "models_html":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        if self.script.fault == "models_deep":
            return web.Response(text="[" * 100_000, content_type="application/json")
        names = [self.script.model] if self.script.models is None else self.script.models
        cards = [{"id": name, "max_model_len": self.script.max_model_len} for name in names]
        return web.json_response({"object": "list", "data": cards})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.script.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        script, seen = self.script, self.seen
        if not script.metrics:
            raise web.HTTPNotFound
        others = script.foreign_running * (len(seen.started_at) >= script.foreign_from)
        foreign = int(script.foreign_tokens_s * (time.monotonic() - self._begun))
        values = {
            "vllm:num_requests_running": seen.running + others,
            "vllm:num_requests_waiting": seen.waiting + script.foreign_waiting,
            "vllm:generation_tokens_total": seen.generated + foreign,
            "vllm:iteration_tokens_total_count": seen.steps,
            "vllm:prompt_tokens_total": seen.prompt_tokens,
            "vllm:prompt_tokens_cached_total": seen.cached,
            "process_start_time_seconds": self.started,
        }
        if script.accepted:
            values["vllm:spec_decode_num_drafts_total"] = seen.drafts
            values["vllm:spec_decode_num_accepted_tokens_total"] = seen.accepted
        if script.a4_rows is not None:
            values["vllm:b12x_a4_prefill_rows_total"] = seen.prompt_tokens * script.a4_rows
        return web.Response(text="".join(f"{name} {value}\n" for name, value in values.items()))

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.script.tokenizer:
            raise web.HTTPNotFound
        tokens = tokens_of((await request.json())["prompt"])
        count = len(tokens) + (1 if self.script.fault == "tokenizer_count" else 0)
        return web.json_response({"tokens": tokens, "count": count})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if not self.script.completions:
            raise web.HTTPNotFound
        body = await request.json()
        prompt = body["prompt"]
        count = len(prompt) if isinstance(prompt, list) else len(tokens_of(prompt))
        return await self._generate(request, body, count, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = " ".join(message["content"] for message in body["messages"])
        if "tools" in body:
            return await self._needle(request, body, text)
        return await self._generate(request, body, len(tokens_of(text)) + 4, chat=True)

    def _fault(self, body: dict[str, Any], chat: bool) -> str | None:
        if not body.get("stream") or self.script.where not in (
            "both",
            "chat" if chat else "completions",
        ):
            return None
        number = next(self._number)
        if self.script.faulty is not None and number not in self.script.faulty:
            return None
        return self.script.fault

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: int, *, chat: bool
    ) -> web.StreamResponse:
        self.seen.requests.append((request.path, body))
        if not self.script.extras and {"cache_salt", "ignore_eos"} & set(body):
            error = {"error": {"message": "Unrecognized request argument", "code": 400}}
            return web.json_response(error, status=400)
        fault = self._fault(body, chat)
        if (refusal := refuse(fault, self.script.key)) is not None:
            return refusal
        wanted = body["max_tokens"]
        if body.get("stream") and self.script.refuses:
            error = {"error": {"message": f"refused for {self.script.refuses}", "code": 400}}
            return web.json_response(error, status=400)
        if not body.get("stream"):
            choice: dict[str, Any] = {"finish_reason": "length"}
            choice |= {"message": {"content": "Yes"}} if chat else {"text": " a"}
            return web.json_response({"choices": [choice], "usage": usage(prompt, wanted)})
        self.seen.started_at.append(time.monotonic())
        self.seen.lingering_at_start.append(self.seen.lingering)
        async with self._slot():
            self.seen.running += 1
            self.seen.most_running = max(self.seen.most_running, self.seen.running)
            response = web.StreamResponse(
                headers={"content-type": "text/event-stream; charset=utf-8"}
            )
            try:
                await self._stream(request, response, body, prompt, chat, fault)
            except ConnectionError:  # the client has gone
                pass
            except asyncio.CancelledError:
                if self.script.linger:
                    self._linger()
                raise
            finally:
                self.seen.running -= 1
            return response

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """One of max_streams, after as long a wait as it takes."""
        self.seen.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.seen.waiting -= 1
        try:
            yield
        finally:
            if self._lost < self.script.lost_slots:
                self._lost += 1
            else:
                self._slots.release()

    def _linger(self) -> None:
        def end() -> None:
            self.seen.running -= 1
            self.seen.lingering -= 1

        self.seen.running += 1
        self.seen.lingering += 1
        asyncio.get_running_loop().call_later(self.script.linger, end)

    async def _prefill(self, body: dict[str, Any], prompt: int) -> None:
        script, seen = self.script, self.seen
        text = json.dumps(body.get("prompt") or body.get("messages"))
        known = (text, body.get("cache_salt") if script.prefix_cache == "salt" else None)
        if script.prefix_cache and known in self._known:
            seen.cached += prompt
        else:
            self._known.add(known)
            if len(seen.started_at) in script.terminate:
                os.kill(os.getpid(), signal.SIGTERM)
            first = script.first_slow if len(seen.started_at) == 1 else 1.0
            await asyncio.sleep(first * prompt / script.prefill_tok_s)
        seen.cached += int(script.cached_share * prompt)
        seen.prompt_tokens += prompt + script.foreign_prompt

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        prompt: int,
        chat: bool,
        fault: str | None,
    ) -> None:
        script, seen = self.script, self.seen
        await response.prepare(request)

        async def send(value: Any) -> None:
            data = value if isinstance(value, str) else json.dumps(value)
            await response.write(f"data: {data}\n\n".encode())

        def event(text: str, done: int, finish: str | None = None) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            chunk: dict[str, Any] = {"choices": [choice]}
            options = body.get("stream_options", {})
            if options.get("continuous_usage_stats") and fault != "no_usage":
                chunk["usage"] = usage(prompt, done, fault)
            return chunk

        await self._prefill(body, prompt)
        wanted = body["max_tokens"]
        if fault == "early_end":
            wanted = max(1, wanted // 2)
        step = done = 0
        begin = time.monotonic()
        while done < wanted:
            if (fault == "stall" and done >= 2) or (fault == "silent" and done >= 20):
                await asyncio.sleep(3600)
            if fault == "broken_chunk" and done >= 2:
                await send('{"choices": [')
            if fault == "odd_chunk" and done >= 2:
                await send({"object": "nothing"})
            if fault == "error_event" and done >= 2:
                await send({"error": {"message": "engine died in /opt/secret/path", "code": 500}})
            if fault == "disconnect" and done >= 2:
                request.transport.abort()
                return
            if fault == "no_end" and done >= 2:
                return
            drafts = script.accepted and step % script.draft_every == 0
            step += 1
            count = min(1 + script.accepted if drafts else 1, wanted - done)
            done += count
            seen.generated += count
            seen.steps += 1 / seen.running  # one engine step serves every running stream
            seen.drafts += bool(drafts)
            seen.accepted += count - 1
            finish = "length" if done >= wanted else None
            await send(event(words(fault, done, count), done, finish))
            now = time.monotonic()
            if now - seen.started_at[0] < script.slow_until:
                await asyncio.sleep(20 * count / script.decode_tok_s)
                begin = time.monotonic() - done / script.decode_tok_s
                continue
            due = begin + done / script.decode_tok_s * (20 if fault == "slow" else 1)
            await asyncio.sleep(max(0.0, due - now))
        if fault != "no_usage":
            await send({"choices": [], "usage": usage(prompt, done, fault)})
        await send("[DONE]")

    async def _needle(
        self, request: web.Request, body: dict[str, Any], text: str
    ) -> web.StreamResponse:
        self.seen.requests.append((request.path, body))
        number = next(self._number)
        kind = self.script.needle
        if self.script.faulty is not None and number not in self.script.faulty:
            kind = "exact"
        if (refusal := refuse(kind, self.script.key)) is not None:
            return refusal
        self.seen.running += 1
        await asyncio.sleep(0.005)
        self.seen.running -= 1
        self.seen.prompt_tokens += len(tokens_of(text))
        if kind == "disconnect":
            request.transport.abort()
        if kind == "broken_body":
            return web.Response(text='{"choices": [{"mess', content_type="application/json")
        facts = {name.lower(): int(value) for name, value in FACT.findall(text)}
        # The notes stand in text order; the weights follow the order in which the request lists the names.
        order = [
            name for name in body["tools"][0]["function"]["parameters"]["required"] if name in facts
        ]
        values = {name: facts[name] for name in order}
        values["checksum"] = sum(w * v for w, v in enumerate(values.values(), 1))
        choice = needle_choice(kind, body["tools"][0]["function"]["name"], values)
        answer = {"choices": [choice], "usage": usage(len(tokens_of(text)), 40, kind)}
        return web.json_response(answer)


@contextlib.contextmanager
def serving(**script: Any) -> Iterator[FakeServer]:
    """A running server with the given script."""
    with FakeServer(Script(**script)) as server:
        yield server


def _main() -> None:
    server = FakeServer(Script(decode_tok_s=float(os.environ.get("FAKE_SPEED", "400"))))
    if "FAKE_A4" in os.environ:
        server.script.a4_rows = os.environ["FAKE_A4"] not in ("", "0")
    server.script.refuses = os.environ.get("FAKE_REFUSES")
    print(f"fake server, A4 prefill: {os.environ.get('FAKE_A4')}", flush=True)
    if "FAKE_LINGER" in os.environ:
        linger = float(os.environ["FAKE_LINGER"])

        def end_later(*_: object) -> None:
            threading.Timer(linger, os._exit, (0,)).start()

        signal.signal(signal.SIGTERM, end_later)
    web.run_app(
        server.app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, shutdown_timeout=0.2,
        handle_signals="FAKE_LINGER" not in os.environ,
    )  # fmt: skip


if __name__ == "__main__":
    _main()
