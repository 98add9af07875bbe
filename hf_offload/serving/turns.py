"""`Engine`: one thread runs a model for all chats, which take turns by forward, first come first served."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_offload.model.hooks import cache_argument
from hf_offload.prefix_store import Found, PrefixStore
from hf_offload.serving.answers import Answer, Delta, Sampler
from hf_offload.serving.requests import RequestError

FIRST, LEAST, MOST = 256, 64, 1024  # tokens of a new prompt's first chunk, of the shortest, of the longest
TURN = 0.7  # seconds that a chunk is to take: other chats wait for it, and so does the end of one whose client left
Work = Generator[list[Delta], None, None]


@dataclass(eq=False)
class Chat:
    """One request."""

    ids: Sequence[int]  # the prompt
    most: int  # tokens of the answer at most; 0: the prompt is only read
    sampler: Sampler
    answer: Answer
    tenant: str  # whose prompts it may continue from
    cached: int | None = None  # tokens that were not read; None before its first turn
    drawn: list[int] = field(default_factory=list)
    reason: str = "length"  # OpenAI's `finish_reason`
    since: float = field(default_factory=time.perf_counter)
    waited: float | None = None  # seconds to the first token


class Engine:
    """Runs the chats of a model; its thread begins with compiling the kernels.

    Args:
        model: the model, in evaluation mode; store: where prompts and answers are kept.
        chats: how many take turns; queue: how many more may wait.
    """

    def __init__(self, model: PreTrainedModel, store: PrefixStore, chats: int, queue: int) -> None:
        self._model, self._store = model, store
        eos: Any = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
        self._eos = {eos} if eos is None or isinstance(eos, int) else set(eos)
        takes = inspect.signature(model.forward).parameters
        self._last_alone = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._slots, self._most, self._stopped = asyncio.Semaphore(chats), chats + queue, False
        self.chats = dict[asyncio.Task[None], Chat]()
        self._thread = ThreadPoolExecutor(1, "Engine", torch.set_grad_enabled, (False,))
        self.warmed = self._thread.submit(self._warm)

    def start(self, chat: Chat, give: Callable[[Any], None]) -> asyncio.Task[None]:
        """Let a chat take turns, unless too many wait; `give` gets each delta, and at the end None or an error.

        When the task is cancelled, the chat ends before its next turn, and what was computed is kept.
        """
        if self._stopped or len(self.chats) >= self._most:
            why = "the server shuts down" if self._stopped else f"{self._most} requests are at work or wait already"
            raise RequestError(f"{why}; ask again later", status=503)
        task = asyncio.create_task(self._run(chat, give))
        self.chats[task] = chat
        task.add_done_callback(self.chats.pop)
        stopped = RequestError("the server shuts down; what was read is kept", status=503)
        task.add_done_callback(lambda task: give(stopped if task.cancelled() else task.exception()))
        return task

    def stop(self) -> None:
        """Take no more chats, and end those at work at their next turn."""
        self._stopped = True
        for task in self.chats:
            task.cancel()

    def close(self) -> None:
        """Wait until what ended chats have computed is kept; none are at work."""
        self._thread.shutdown()

    async def _run(self, chat: Chat, give: Callable[[Delta], None]) -> None:
        loop, work = asyncio.get_running_loop(), self._work(chat)
        try:
            async with self._slots:
                while (deltas := await loop.run_in_executor(self._thread, next, work, None)) is not None:
                    for delta in deltas:
                        give(delta)
        finally:
            self._thread.submit(work.close)  # behind the chat's own turn, if that is computed now

    def _work(self, chat: Chat) -> Work:
        """Read a prompt and draw its answer, a forward between two yields; what was computed is kept."""
        with self._store.open(chat.ids, tenant=chat.tenant) as found:
            chat.cached = first = found.tokens
            if first:
                yield []  # to load it from disk takes time, too
            count = LEAST if first else FIRST  # far into a context a token takes longer
            while (left := len(chat.ids) - first) > count + 1:  # a single token would be a decode step
                start = time.perf_counter()
                found.resume()
                self._logits(found.cache, chat.ids[first : first + count])
                first, seconds = first + count, time.perf_counter() - start
                count = min(max(int(count * TURN / seconds), LEAST), MOST)
                yield []
            found.resume()
            logits = self._logits(found.cache, chat.ids[-left:])
            with contextlib.suppress(GeneratorExit):  # the client has left
                yield from self._draw(chat, found, logits) if chat.most else ()
            found.keep([[*chat.ids, *chat.drawn]])  # after an error the prompt alone is kept

    def _draw(self, chat: Chat, found: Found, logits: torch.Tensor) -> Work:
        while True:
            chat.drawn.append(token := chat.sampler.draw(logits))
            chat.waited = chat.waited or time.perf_counter() - chat.since
            yield [] if token in self._eos else chat.answer.add(token)
            ended = token in self._eos or chat.answer.stopped
            if ended or len(chat.drawn) == chat.most:
                break
            found.resume()
            logits = self._logits(found.cache, [token])
        chat.reason = ("tool_calls" if chat.answer.calls else "stop") if ended else "length"
        yield chat.answer.end()

    def _logits(self, cache: Any, ids: Sequence[int]) -> torch.Tensor:
        """The logits `[1, vocabulary]` after some tokens."""
        given = torch.tensor([ids], dtype=torch.int64, device=self._model.device)
        logits: torch.Tensor = self._model(given, **self._last_alone, **cache_argument(self._model, cache)).logits
        return logits[:, -1]

    def _warm(self) -> None:
        """Compile what prompts, forks, appends and decode steps need: seconds, or once a machine a minute."""
        most = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2048
        ids, cache = [3 + i % 50 for i in range(min(1200, most - 32))], self._store.new_cache()
        for part in (ids[:FIRST], ids[:1], ids[FIRST:]):  # digests begin at 1,024 tokens
            self._logits(cache, part)
        cache = cache.fork()
        for part in (*(ids[:count] for count in range(2, 8)), ids[:1], ids[:1]):
            self._logits(cache, part)
