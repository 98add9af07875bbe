"""The HTTP side of the server: endpoints in OpenAI's form, who may use them, metrics, and the process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_offload.prefix_store import PrefixStore
from hf_offload.serving.requests import Asked, Chatted, Prompted, RequestError, parse
from hf_offload.serving.text import Answer, Delta
from hf_offload.serving.turns import Chat, Engine

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
PING, PATIENCE = 10.0, 30
"""Seconds without a token until a stream gets a comment, lest it be taken for dead; that answers may take to end."""


@dataclass
class Service:
    """What endpoints share.

    Args:
        model, tokenizer: the model, in evaluation mode, with `attn_implementation="hybrid_sparse"`.
        store: where prompts and answers are kept.
        name: the model's; requests may have any.
        max_context: tokens of prompt and answer together.
        keys: API keys, each a tenant of the store; none: everybody may ask.
        hosts: names that a request's Host may have.
        origins: pages that browsers may ask from.
        chats, queue: as for `Engine`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: PrefixStore
    name: str
    max_context: int
    keys: Sequence[str] = ()
    hosts: Collection[str] = LOCAL
    origins: Sequence[str] = ()
    chats: int = 8
    queue: int = 32

    def __post_init__(self) -> None:
        self.first_tokens = (0, 0.0)  # how many, and the seconds of all
        self.counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "generated_tokens", "prefix_hits"), 0)
        self.engine = Engine(self.model, self.store, self.chats, self.queue, self._count)
        self._thinks = "<think>" in str(self.tokenizer.chat_template) or "<think>" in self.tokenizer.get_vocab()

    async def guard(self, request: Request) -> None:
        """Refuse other hosts' pages, bodies that a page could send without asking, and requests without a key.

        Raises:
            RequestError: it is one of these.
        """
        host = request.headers.get("host", "").lower()
        if (host if host.endswith("]") else host.rsplit(":", 1)[0]) not in self.hosts:
            raise RequestError(f"Host {host!r} is not allowed; name it with --allow-host", status=403)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise RequestError(f"Content-Type {kind!r} is not supported; send application/json", status=415)
        known = [hmac.compare_digest(_key(request).encode(), each.encode()) for each in self.keys]
        if known and not any(known) and request.url.path != "/health":
            raise RequestError("Authorization has no API key of this server", None, "invalid_api_key", status=401)

    async def begin(
        self, request: Request, asked: Chatted | Prompted, *, answer: bool = True
    ) -> tuple[Chat, AsyncIterator[Delta | None]]:
        """Hand a request to the engine; return its deltas as they come, and None where none came for a while.

        Raises:
            RequestError: it does not fit the context, or too many wait.
        """
        ids = await asyncio.to_thread(asked.ids, self.tokenizer, answer=answer)
        left, chat = self.max_context - len(ids), isinstance(asked, Chatted)
        if left < 1 or not ids:
            told = f"the prompt has {len(ids)} tokens; this server takes 1 to {self.max_context - 1} (--max-context)"
            raise RequestError(told, "messages" if chat else "prompt", "context_length_exceeded" if left < 1 else None)
        whose = [_key(request) if self.keys else "", asked.cache_salt]
        tenant = hashlib.sha256(json.dumps(whose).encode()).hexdigest() if any(whose) else ""
        thinks = self._thinks and chat
        within = thinks and str(self.tokenizer.decode(ids[-8:])).rstrip().endswith("<think>")
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        tools = asked.offered if isinstance(asked, Chatted) else ()
        text = Answer(self.tokenizer, stop=[*filter(None, stop)], thinks=thinks, within=within, tools=tools)
        how = asked.sampling(self.model.generation_config, self.model.config.get_text_config(decoder=True).vocab_size)
        most = min(asked.max_completion_tokens or asked.max_tokens or left, left) if answer else 0
        loop, queue, since = asyncio.get_running_loop(), asyncio.Queue[Delta | Exception | None](), time.perf_counter()

        def send(event: Delta | Exception | None) -> None:
            nonlocal since
            if isinstance(event, dict) and since:
                count, seconds = self.first_tokens
                self.first_tokens, since = (count + 1, seconds + time.perf_counter() - since), 0.0
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, event)

        job = Chat(ids, most, how, text, tenant, send)
        self.engine.submit(job)
        return job, _events(queue, job, asyncio.create_task(_watch(request, job)))

    def _count(self, chat: Chat) -> None:
        if chat.cached is None:  # it had no turn
            return
        found = (len(chat.ids), chat.cached, len(chat.drawn), chat.cached > 0)
        self.counts = {name: self.counts[name] + value for name, value in zip(self.counts, found, strict=True)}

    def metrics(self) -> str:
        """What /metrics tells, in Prometheus' text format."""
        counts = self.counts | {"saved_prompts": self.store.saves, "evictions": self.store.evictions}
        now = {"store_ram_bytes": self.store.ram_bytes, "store_disk_bytes": self.store.disk_bytes}
        now |= {"chats_running": len(self.engine.running), "chats_waiting": len(self.engine.waiting)}
        lines = [f"# TYPE hf_offload_{k} counter\nhf_offload_{k}_total {v}" for k, v in counts.items()]
        lines += [f"# TYPE hf_offload_{k} gauge\nhf_offload_{k} {v}" for k, v in now.items()]
        name, (count, seconds) = "hf_offload_first_token_seconds", self.first_tokens
        return "\n".join([*lines, f"# TYPE {name} summary", f"{name}_sum {seconds}", f"{name}_count {count}", ""])


async def _watch(request: Request, chat: Chat) -> None:
    """End a chat at its next turn when its client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    chat.gone = True


async def _events(
    queue: asyncio.Queue[Delta | Exception | None], chat: Chat, watch: asyncio.Task[None]
) -> AsyncIterator[Delta | None]:
    try:
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), PING)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, Exception):
                raise event
            if event is None:
                return
            yield event
    finally:
        chat.gone = True
        watch.cancel()


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
    told["total_tokens"] = sum(told.values())
    return told | {"prompt_tokens_details": {"cached_tokens": chat.cached or 0}}


async def _stream(
    job: Chat, events: AsyncIterator[Delta | None], form: Callable[..., dict[str, Any]], asked: Asked
) -> AsyncIterator[str]:
    def line(body: Any) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    if isinstance(asked, Chatted):
        yield line(form({"role": "assistant", "content": ""}, None))
    try:
        async for event in events:
            yield ": ping\n\n" if event is None else line(form(event, None))
    except Exception as error:  # the status is sent already
        yield line(_error(error)[1])
        return
    yield line(form({}, job.reason))
    if asked.stream_options and asked.stream_options.include_usage:
        yield line(form(None, None, usage=_usage(job)))
    yield "data: [DONE]\n\n"


async def _whole(events: AsyncIterator[Delta | None]) -> Delta:
    """The message that deltas make."""
    deltas = [event async for event in events if event is not None]
    text, thought = ("".join(each.get(k, "") for each in deltas) for k in ("content", "reasoning_content"))
    calls = [{k: call[k] for k in call if k != "index"} for each in deltas for call in each.get("tool_calls", ())]
    message: Delta = {"role": "assistant", "content": text or (None if calls else "")}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def make_app(service: Service) -> FastAPI:
    """Return the app of a service."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(service.guard)])
    for kind in (ValueError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    if service.origins:
        app.add_middleware(CORSMiddleware, allow_origins=service.origins, allow_methods=["*"], allow_headers=["*"])

    async def answer(request: Request, asked: Chatted | Prompted) -> Response:
        job, events = await service.begin(request, asked)
        form = _form(isinstance(asked, Chatted), asked.model or service.name)
        if asked.stream:
            return StreamingResponse(_stream(job, events, form, asked), media_type="text/event-stream")
        message = await _whole(events)
        return JSONResponse(form(message, job.reason, whole=True, usage=_usage(job)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, parse(Chatted, await request.body()))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, parse(Prompted, await request.body()))

    @app.post("/v1/prefixes")
    async def prefixes(request: Request) -> Response:
        body = await request.body()
        asked = parse(Chatted, body) if b'"messages"' in body else parse(Prompted, body)
        job, events = await service.begin(request, asked, answer=False)
        await _whole(events)
        return JSONResponse({"object": "prefix", "tokens": len(job.ids), "cached_tokens": job.cached})

    model = {"id": service.name, "object": "model", "created": int(time.time()), "owned_by": "hf_offload"}
    model["max_model_len"] = service.max_context

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def model_by_name(name: str) -> Response:
        if name != service.name:
            told = f"there is no model {name!r}; this server has {service.name!r}"
            raise RequestError(told, "model", "model_not_found", status=404)
        return JSONResponse(model)

    @app.get("/health")
    async def health() -> Response:
        ready, failed = service.engine.ready, service.engine.failed
        return JSONResponse({"status": "ok" if ready else failed or "kernels are compiled"}, 200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await asyncio.to_thread(service.metrics))

    return app


class _Server(uvicorn.Server):
    """A server whose first signal ends the chats, and whose second ends the process."""

    engine: Engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # entries of the store are whole at every moment
        self.should_exit = True
        self.engine.stop(wait=False)


def run(service: Service, host: str, port: int) -> None:
    """Serve until a signal comes, then save what was computed.

    Raises:
        OSError: it cannot be saved.
    """
    options: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": PATIENCE}
    server = _Server(uvicorn.Config(make_app(service), host=host, port=port, **options))
    server.engine = service.engine
    server.run()
    service.engine.stop()
    service.store.close()
