"""The HTTP side of the server: endpoints in OpenAI's form, who may use them, metrics, and the process."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_offload.prefix_store import PrefixStore
from hf_offload.serving.requests import Chatted, Prompted, RequestError, parse
from hf_offload.serving.sampling import Sampler
from hf_offload.serving.text import Answer, Delta
from hf_offload.serving.turns import Chat, Engine

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
PREFIXES = "/v1/prefixes"
KINDS: dict[str, tuple[type[Chatted | Prompted], ...]] = {
    "/v1/chat/completions": (Chatted,), "/v1/completions": (Prompted,), PREFIXES: (Chatted, Prompted),
}  # fmt: skip
BODY, PING, PATIENCE = 32 << 20, 10.0, 30
"""Bytes of a request at most; seconds between comments in a stream, lest it be taken for dead; seconds that responses
may take to end when the server stops."""
BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, math.inf)
"""Bounds of the histogram of first-token times, in seconds."""


@dataclass
class Service:
    """The endpoints of a model; `app` has them.

    Args:
        model, tokenizer: the model, in evaluation mode, with `attn_implementation="hybrid_sparse"`.
        store: where prompts and answers are kept.
        name: the model's; requests may have any.
        max_context: tokens of prompt and answer together; remedy: what allows more.
        keys: API keys, each a tenant of the store; none: everybody may ask.
        hosts: names that a request's Host may have; origins: pages that browsers may ask from.
        chats, queue: as for `Engine`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: PrefixStore
    name: str
    max_context: int
    remedy: str = "a larger --max-context"
    keys: Sequence[str] = ()
    hosts: Collection[str] = LOCAL
    origins: Sequence[str] = ()
    chats: int = 8
    queue: int = 32

    def __post_init__(self) -> None:
        self._counts = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0, prefix_hits=0)
        self._first_tokens, self._first_seconds = dict.fromkeys(BUCKETS, 0), 0.0
        self.tokenizer("")  # sets up what threads must not set up while others read it
        self._thinks = "<think>" in str(self.tokenizer.chat_template) or "<think>" in self.tokenizer.get_vocab()
        self._about = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "hf_offload"}
        self._about["max_model_len"] = self.max_context
        self.engine = Engine(self.model, self.store, self.chats, self.queue, self._count)
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(self._guard)])
        for kind in (ValueError, HTTPException, ClientDisconnect, Exception):
            self.app.add_exception_handler(kind, _refuse)
        if self.origins:
            every = ["*"]
            self.app.add_middleware(
                CORSMiddleware, allow_origins=self.origins, allow_methods=every, allow_headers=every
            )
        for path in KINDS:
            self.app.post(path)(self._ask)
        self.app.get("/v1/models")(self._models)
        self.app.get("/v1/models/{name:path}")(self._model)
        self.app.get("/health")(self._health)
        self.app.get("/metrics")(self._metrics)

    async def _guard(self, request: Request) -> None:
        """Refuse other hosts' pages, bodies that a page could send without asking, and requests without a key."""
        host = request.headers.get("host", "").lower()
        if (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in self.hosts:
            raise RequestError(f"Host {host!r} is not allowed; name it with --allow-host", status=403)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise RequestError(f"Content-Type {kind!r} is not supported; send application/json", status=415)
        known = [hmac.compare_digest(_key(request).encode(), each.encode()) for each in self.keys]
        if known and not any(known) and request.url.path != "/health":
            raise RequestError("Authorization has no API key of this server", None, "invalid_api_key", status=401)

    async def _ask(self, request: Request) -> Response:
        path, body = request.url.path, bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise RequestError(f"the body has more than {BODY >> 20} MiB; send less", status=413)
        asked = parse(bytes(body), *KINDS[path])
        chat = await self._chat(request, asked, answer=path != PREFIXES)
        events, form = self._events(request, chat), _form(isinstance(asked, Chatted), asked.model or self.name)
        if asked.stream and path != PREFIXES:
            lines = _stream(chat, events, form, asked.stream_options.include_usage)
            return StreamingResponse(lines, media_type="text/event-stream")
        deltas = [event async for event in events if event is not None]
        if path == PREFIXES:
            return JSONResponse({"object": "prefix", "tokens": len(chat.ids), "cached_tokens": chat.cached})
        return JSONResponse(form(_message(chat, deltas), chat.reason, whole=True, usage=_usage(chat)))

    async def _chat(self, request: Request, asked: Chatted | Prompted, *, answer: bool) -> Chat:
        """What the engine is to do; a prompt that does not fit the context is refused."""
        ids = await asyncio.to_thread(asked.ids, self.tokenizer, answer=answer)
        left = self.max_context - len(ids)
        if left < 1 or not ids:
            told = f"the prompt has {len(ids)} tokens; this server takes 1 to {self.max_context - 1}: send less, or "
            code = "context_length_exceeded" if ids else None
            raise RequestError(told + f"start it with {self.remedy}", asked.subject, code)
        whose = [_key(request) if self.keys else "", asked.cache_salt]
        tenant = hashlib.sha256(json.dumps(whose).encode()).hexdigest() if any(whose) else ""
        thinks, tools = (self._thinks, asked.offered) if isinstance(asked, Chatted) else (False, [])
        within = thinks and str(self.tokenizer.decode(ids[-8:])).rstrip().endswith("<think>")
        text = Answer(self.tokenizer, stop=asked.stop, thinks=thinks, within=within, tools=tools)
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        sampler = Sampler(asked, self.model.generation_config, ids, vocabulary)
        most = min(asked.max_completion_tokens or asked.max_tokens or left, left) if answer else 0
        return Chat(ids, most, sampler, text, tenant)

    def _events(self, request: Request, chat: Chat) -> AsyncIterator[Delta | None]:
        """Hand a chat to the engine; return its deltas as they come, and None every ten seconds."""
        queue = asyncio.Queue[Any]()
        task = self.engine.start(chat, queue.put_nowait)

        async def watch() -> None:
            while not task.cancelling():
                try:
                    message = await asyncio.wait_for(request.receive(), PING)
                    _ = message["type"] == "http.disconnect" and task.cancel()
                except TimeoutError:
                    queue.put_nowait(PING)

        async def events() -> AsyncIterator[Delta | None]:
            try:
                while (event := await queue.get()) is not None:
                    if isinstance(event, Exception):
                        raise event
                    yield None if event is PING else event
            finally:
                task.cancel()
                watching.cancel()

        watching = asyncio.create_task(watch())
        return events()

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._about]})

    async def _model(self, name: str) -> Response:
        if name == self.name:
            return JSONResponse(self._about)
        told = f"there is no model {name!r}; this server has {self.name!r}"
        raise RequestError(told, "model", "model_not_found", status=404)

    async def _health(self) -> Response:
        warmed = self.engine.warmed
        failed = warmed.exception() if warmed.done() else "kernels are compiled"
        return JSONResponse({"status": str(failed or "ok")}, 503 if failed else 200)

    async def _metrics(self) -> Response:
        return PlainTextResponse(await asyncio.to_thread(self.metrics))

    def metrics(self) -> str:
        """What /metrics tells, in Prometheus' text format."""
        counts = dict(self._counts) | {"saved_prompts": self.store.saves, "evictions": self.store.evictions}
        chats = len(self.engine.chats)
        now = {"store_ram_bytes": self.store.ram_bytes, "store_disk_bytes": self.store.disk_bytes}
        now |= {"chats_running": min(chats, self.chats), "chats_waiting": max(chats - self.chats, 0)}
        lines = [f"# TYPE hf_offload_{k} counter\nhf_offload_{k}_total {v}" for k, v in counts.items()]
        lines += [f"# TYPE hf_offload_{k} gauge\nhf_offload_{k} {v}" for k, v in now.items()]
        name, found = "hf_offload_first_token_seconds", self._first_tokens
        bounds = [f'{name}_bucket{{le="{str(k).replace("inf", "+Inf")}"}} {v}' for k, v in found.items()]
        lines += [f"# TYPE {name} histogram", *bounds, f"{name}_sum {self._first_seconds}"]
        return "\n".join([*lines, f"{name}_count {found[math.inf]}", ""])

    def _count(self, chat: Chat) -> None:
        """Count a chat that has ended."""
        if chat.cached is not None:  # else it had no turn
            self._counts.update(prompt_tokens=len(chat.ids), cached_tokens=chat.cached, prefix_hits=chat.cached > 0)
            self._counts.update(generated_tokens=len(chat.drawn))
        if chat.waited is not None:
            self._first_seconds += chat.waited
            self._first_tokens = {bound: n + (chat.waited <= bound) for bound, n in self._first_tokens.items()}


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _error(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error, in OpenAI's form."""
    status = 400 if isinstance(error, ValueError) else 503 if isinstance(error, MemoryError) else 500
    status = getattr(error, "status", getattr(error, "status_code", status))
    told = {"message": str(getattr(error, "detail", error)) or type(error).__name__}
    told["type"] = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": told | {name: getattr(error, name, None) for name in ("param", "code")}}


async def _refuse(_: Request, error: Exception) -> Response:
    status, body = _error(error)
    return JSONResponse(body, status, {"Retry-After": "5"} if status == 503 else None)


def _form(chat: bool, model: str) -> Callable[..., dict[str, Any]]:
    """How an answer is written, or a part of it; `part` None: no choice."""
    shared = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def body(part: Delta | None, reason: str | None, *, whole: bool = False, **more: Any) -> dict[str, Any]:
        own = {"message" if whole else "delta": part} if chat else {"text": (part or {}).get("content") or ""}
        choice = {"index": 0, "finish_reason": reason, "logprobs": None} | own
        kind = ("chat.completion" if whole else "chat.completion.chunk") if chat else "text_completion"
        return shared | {"object": kind, "choices": [] if part is None else [choice]} | more

    return body


def _usage(chat: Chat) -> dict[str, Any]:
    told = {"prompt_tokens": len(chat.ids), "completion_tokens": len(chat.drawn)}
    return told | {"total_tokens": sum(told.values()), "prompt_tokens_details": {"cached_tokens": chat.cached or 0}}


async def _stream(
    chat: Chat, events: AsyncIterator[Delta | None], form: Callable[..., dict[str, Any]], usage: bool
) -> AsyncIterator[str]:
    """The lines of a stream of server-sent events."""
    yield _line(form({"role": "assistant", "content": ""}, None))
    try:
        async for event in events:
            yield ": ping\n\n" if event is None else _line(form(event, None))
    except Exception as error:  # the status is sent already
        status, body = _error(error)
        if status == 500:
            logging.getLogger("uvicorn.error").error("a stream has ended by an error", exc_info=error)
        yield _line(body)
    else:
        yield _line(form({}, chat.reason))
        if usage:
            yield _line(form(None, None, usage=_usage(chat)))
        yield "data: [DONE]\n\n"


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def _message(chat: Chat, deltas: Sequence[Delta]) -> Delta:
    """The message that deltas make."""
    text, thought = ("".join(each.get(k, "") for each in deltas) for k in ("content", "reasoning_content"))
    more = {"reasoning_content": thought, "tool_calls": chat.answer.calls}
    message = {"role": "assistant", "content": text or (None if chat.answer.calls else "")}
    return message | {name: value for name, value in more.items() if value}


class _Server(uvicorn.Server):
    """A server whose first signal ends the chats, and whose second ends the process."""

    engine: Engine

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # entries of the store are whole at every moment
        self.should_exit = True

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self.engine.stop()
        await super().shutdown(sockets)


def run(service: Service, host: str, port: int) -> None:
    """Serve until a signal comes, then save what was computed.

    Raises:
        OSError: it cannot be saved.
    """
    config = uvicorn.Config(service.app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=PATIENCE)
    server = _Server(config)
    server.engine = service.engine
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # also while the store is closed
    server.run()
    service.engine.close()
    service.store.close()
