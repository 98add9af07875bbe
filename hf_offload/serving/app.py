"""The HTTP side of the server: endpoints in OpenAI's form, who may use them, and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_offload.prefix_store import PrefixStore
from hf_offload.serving.answers import Answer, Delta, Sampler
from hf_offload.serving.requests import Chatted, Prompted, RequestError, parse
from hf_offload.serving.turns import Chat, Engine

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
PREFIXES = "/v1/prefixes"
KINDS: Any = {"/v1/chat/completions": [Chatted], "/v1/completions": [Prompted], PREFIXES: [Chatted, Prompted]}
Body = dict[str, Any]
Events = AsyncIterator[Delta | None]
BODY, PING = 32 << 20, 10.0  # bytes of a request at most; seconds between comments in a stream, lest it seem dead
BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, math.inf)  # of the first-token times, in seconds


@dataclass
class Service:
    """The endpoints of a model; `app` has them."""

    model: PreTrainedModel  # in evaluation mode, with `attn_implementation="hybrid_sparse"`
    tokenizer: PreTrainedTokenizerBase
    store: PrefixStore  # where prompts and answers are kept
    name: str  # the model's; requests may have any
    max_context: int  # tokens of prompt and answer together
    remedy: str = "a larger --max-context"  # what allows more
    keys: Sequence[str] = ()  # API keys, each a tenant of the store; none: everybody may ask
    hosts: Collection[str] = LOCAL  # names that a request's Host may have
    chats: int = 8  # as for `Engine`
    queue: int = 32

    def __post_init__(self) -> None:
        self._counts = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0, prefix_hits=0)
        self._first_tokens, self._seconds = dict.fromkeys(BUCKETS, 0), 0.0
        self.tokenizer("")  # sets up what threads must not set up while others read it
        self._thinks = "<think>" in str(self.tokenizer.chat_template) or "<think>" in self.tokenizer.get_vocab()
        self._about = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "hf_offload"}
        self._about["max_model_len"] = self.max_context
        self.engine = Engine(self.model, self.store, self.chats, self.queue)
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(self._guard)])
        for kind in (ValueError, HTTPException, ClientDisconnect, Exception):
            self.app.add_exception_handler(kind, _refuse)
        for path in KINDS:
            self.app.post(path)(self._ask)
        for path in ("/v1/models", "/v1/models/{name:path}"):
            self.app.get(path)(self._models)
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
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        request.state.key = key.strip() if self.keys and scheme.lower() == "bearer" else ""
        valid = [hmac.compare_digest(request.state.key.encode(), each.encode()) for each in self.keys]
        if valid and not any(valid) and request.scope["path"] != "/health":
            raise RequestError("Authorization has no API key of this server", None, "invalid_api_key", status=401)

    async def _ask(self, request: Request) -> Response:
        path, body = request.scope["path"], bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise RequestError(f"the body has more than {BODY >> 20} MiB; send less", status=413)
        asked = parse(bytes(body), *KINDS[path])
        chat = await self._chat(request, asked, answer=path != PREFIXES)
        events, form = self._events(request, chat), _form(chat, isinstance(asked, Chatted), asked.model or self.name)
        if asked.stream and path != PREFIXES:
            lines = _stream(chat, events, form, asked.stream_options.get("include_usage", False))
            return StreamingResponse(lines, media_type="text/event-stream")
        message = _message([event async for event in events if event is not None], chat.answer.calls)
        if path == PREFIXES:
            return JSONResponse({"object": "prefix", "tokens": len(chat.ids), "cached_tokens": chat.cached})
        return JSONResponse(form(message, chat.reason, whole=True, usage=True))

    async def _chat(self, request: Request, asked: Chatted | Prompted, *, answer: bool) -> Chat:
        """What the engine is to do; a prompt that does not fit the context is refused."""
        ids = await asyncio.to_thread(asked.ids, self.tokenizer, answer=answer)
        left = self.max_context - len(ids)
        if left < 1 or not ids:
            why = f"the prompt has {len(ids)} tokens, not 1 to {self.max_context - 1}; send less, or use {self.remedy}"
            raise RequestError(why, asked.subject, "context_length_exceeded" if ids else None)
        whose = [request.state.key, asked.cache_salt]
        tenant = hashlib.sha256(json.dumps(whose).encode()).hexdigest() if any(whose) else ""
        thinks, tools = (self._thinks, asked.offered) if isinstance(asked, Chatted) else (False, [])
        within = thinks and str(self.tokenizer.decode(ids[-8:])).rstrip().endswith("<think>")
        text = Answer(self.tokenizer, stop=asked.stop, thinks=thinks, within=within, tools=tools)
        sampler = Sampler(asked, self.model.generation_config, ids, self.model.config.get_text_config().vocab_size)
        most = min(asked.max_completion_tokens or asked.max_tokens or left, left) if answer else 0
        return Chat(ids, most, sampler, text, tenant)

    def _events(self, request: Request, chat: Chat) -> Events:
        """Hand a chat to the engine; return its deltas as they come, and None every ten seconds."""
        queue = asyncio.Queue[Any]()
        task = self.engine.start(chat, queue.put_nowait)
        task.add_done_callback(lambda _: self._count(chat))

        async def watch() -> None:
            message: Any = {"type": ""}
            while message["type"] != "http.disconnect":
                try:
                    message = await asyncio.wait_for(request.receive(), PING)
                except TimeoutError:
                    queue.put_nowait(PING)
            task.cancel()

        async def events() -> Events:
            try:
                while (event := await queue.get()) is not None:
                    if isinstance(event, Exception):
                        raise event
                    yield None if event is PING else event
            finally:
                task.cancel()

        watching = asyncio.create_task(watch())
        task.add_done_callback(lambda _: watching.cancel())
        return events()

    async def _models(self, name: str | None = None) -> Response:
        if name not in (None, self.name):
            why = f"there is no model {name!r}; this server has {self.name!r}"
            raise RequestError(why, "model", "model_not_found", status=404)
        return JSONResponse(self._about if name else {"object": "list", "data": [self._about]})

    async def _health(self) -> Response:
        warmed = self.engine.warmed
        failed = warmed.exception() if warmed.done() else "kernels are compiled"
        return JSONResponse({"status": str(failed or "ok")}, 503 if failed else 200)

    async def _metrics(self) -> Response:
        ram, disk = await asyncio.to_thread(lambda: (self.store.ram_bytes, self.store.disk_bytes))
        chats, counts = len(self.engine.chats), {f"{name}_total": count for name, count in self._counts.items()}
        counts |= {"saved_prompts_total": self.store.saves, "evictions_total": self.store.evictions}
        counts |= {"store_ram_bytes": ram, "store_disk_bytes": disk}
        counts |= {"chats_running": min(chats, self.chats), "chats_waiting": max(chats - self.chats, 0)}
        kind = {True: "counter", False: "gauge"}
        lines = [f"# TYPE hf_offload_{k} {kind['_total' in k]}\nhf_offload_{k} {v}" for k, v in counts.items()]
        name, buckets = "hf_offload_first_token_seconds", self._first_tokens
        lines += [f"# TYPE {name} histogram\n{name}_sum {self._seconds}\n{name}_count {buckets[math.inf]}"]
        lines += [f'{name}_bucket{{le="{str(k).replace("inf", "+Inf")}"}} {v}' for k, v in buckets.items()]
        return PlainTextResponse("\n".join([*lines, ""]))

    def _count(self, chat: Chat) -> None:
        """Count a chat that has ended."""
        if (cached := chat.cached) is not None:  # else it had no turn
            self._counts.update(prompt_tokens=len(chat.ids), cached_tokens=cached, generated_tokens=len(chat.drawn))
            self._counts.update(prefix_hits=cached > 0)
        if (waited := chat.waited) is not None:
            self._seconds += waited
            self._first_tokens = {bound: count + (waited <= bound) for bound, count in self._first_tokens.items()}


def _error(error: Exception) -> tuple[int, Body]:
    """The status and the body of an error, in OpenAI's form."""
    status = 400 if isinstance(error, ValueError) else 503 if isinstance(error, MemoryError) else 500
    status = getattr(error, "status", getattr(error, "status_code", status))
    body = {"message": str(getattr(error, "detail", error)) or type(error).__name__}
    body["type"] = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": body | {name: getattr(error, name, None) for name in ("param", "code")}}


async def _refuse(_: Request, error: Exception) -> Response:
    status, body = _error(error)
    return JSONResponse(body, status, {"Retry-After": "5"} if status == 503 else None)


def _form(chat: Chat, messages: bool, model: str) -> Callable[..., Body]:
    """How the answer to a chat is written, or a part of it; `part` None: no choice."""
    name = f"{'chatcmpl' if messages else 'cmpl'}-{uuid.uuid4().hex}"
    shared = {"id": name, "created": int(time.time()), "model": model}

    def body(part: Delta | None, reason: str | None = None, *, whole: bool = False, usage: bool = False) -> Body:
        own = {"message" if whole else "delta": part} if messages else {"text": (part or {}).get("content") or ""}
        choice = {"index": 0, "finish_reason": reason, "logprobs": None} | own
        kind = ("chat.completion" if whole else "chat.completion.chunk") if messages else "text_completion"
        counts = {"prompt_tokens": len(chat.ids), "completion_tokens": len(chat.drawn)}
        counts |= {"total_tokens": sum(counts.values())}
        more = {"usage": counts | {"prompt_tokens_details": {"cached_tokens": chat.cached or 0}}} if usage else {}
        return shared | {"object": kind, "choices": [] if part is None else [choice]} | more

    return body


async def _stream(chat: Chat, events: Events, form: Callable[..., Body], usage: bool) -> AsyncIterator[str]:
    """The lines of a stream of server-sent events."""

    def line(body: Body) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    try:
        yield line(form({"role": "assistant", "content": ""}))
        async for event in events:
            yield ": ping\n\n" if event is None else line(form(event))
        yield line(form({}, chat.reason))
        if usage:
            yield line(form(None, usage=True))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status is sent already
        if not isinstance(error, RequestError):
            logging.getLogger("uvicorn.error").error("a stream has ended by an error", exc_info=error)
        yield line(_error(error)[1])


def _message(deltas: Sequence[Delta], calls: list[Delta]) -> Delta:
    """The message that deltas make."""
    text, thought = ("".join(each.get(k, "") for each in deltas) for k in ("content", "reasoning_content"))
    more = {"reasoning_content": thought, "tool_calls": calls}
    return {"role": "assistant", "content": text or (None if calls else "")} | {k: x for k, x in more.items() if x}
