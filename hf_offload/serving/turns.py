"""`Engine`: one thread runs a model for all chats, which take turns by forward, first come first served."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_offload.model.hooks import cache_argument
from hf_offload.prefix_store import Found, PrefixStore
from hf_offload.serving.requests import RequestError
from hf_offload.serving.sampling import Sampler
from hf_offload.serving.text import Answer, Delta

FIRST, LEAST, MOST = 256, 64, 1024
"""Tokens of a prompt's first chunk, of the shortest and of the longest."""
TURN = 0.7
"""Seconds that a chunk is to take: other chats wait for it, and so does the end of one whose client has left."""
WARM = 1200
"""Tokens of the prompt that compiles the kernels: digests begin at 1,024."""

Work = Generator[None, None, None]


@dataclass(eq=False)
class Chat:
    """One request.

    Args:
        ids: the prompt.
        most: tokens of the answer at most; 0: the prompt is only read.
        how: how they are drawn, as for `Sampler`.
        answer: turns them into text.
        tenant: whose prompts it may continue from.
        send: is called with each delta, and at the end with None or an error, on the engine's thread.
    """

    ids: Sequence[int]
    most: int
    how: Mapping[str, Any]
    answer: Answer
    tenant: str
    send: Callable[[Delta | Exception | None], None]
    gone: bool = False  # its client has left: it ends at its next turn, and what was computed is kept
    cached: int | None = None  # tokens that were not read; None before its first turn
    drawn: list[int] = field(default_factory=list)
    reason: str = "length"  # OpenAI's `finish_reason`


class Engine:
    """Runs the chats of a model; its thread begins with compiling the kernels.

    Args:
        model: the model, in evaluation mode.
        store: where prompts and answers are kept.
        chats: how many take turns; queue: how many more may wait.
        ended: is called with each chat at its end.
    """

    def __init__(
        self, model: PreTrainedModel, store: PrefixStore, chats: int, queue: int, ended: Callable[[Chat], None]
    ) -> None:
        self._model, self._store, self._chats, self._queue, self._ended = model, store, chats, queue, ended
        eos: Any = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
        self._eos = {eos} if eos is None or isinstance(eos, int) else set(eos)
        takes = inspect.signature(model.forward).parameters
        self._last_alone = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._changed, self._stopped = threading.Condition(), False
        self.waiting, self.running = deque[Chat](), deque[tuple[Chat, Work]]()
        self.ready, self.failed = False, ""
        """Whether kernels are compiled; why they could not be."""
        self._thread = threading.Thread(target=self._run, name="Engine", daemon=True)
        self._thread.start()

    def submit(self, chat: Chat) -> None:
        """Let a chat take turns, now or when others have ended.

        Raises:
            RequestError: too many wait, or the engine is stopped.
        """
        with self._changed:
            if self._stopped:
                raise RequestError("the server shuts down; ask again when it is back", status=503)
            if len(self.running) + len(self.waiting) >= self._chats + self._queue:
                raise RequestError(f"{len(self.waiting)} requests wait already; ask again later", status=503)
            self.waiting.append(chat)
            self._changed.notify_all()

    def stop(self, *, wait: bool = True) -> None:
        """Take no more chats, end those at work at their next turn, and wait until they have."""
        self._stopped = True  # without the lock: a signal's handler may interrupt who holds it
        if wait:
            with self._changed:
                self._changed.notify_all()
            self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # in this thread
        try:
            self._warm()
            self.ready = True
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"
        while True:
            with self._changed:
                while not (self.waiting or self.running or self._stopped):
                    self._changed.wait()
            self._admit()
            if not self.running:
                if self._stopped and not self.waiting:
                    return
            elif self._turn(*self.running[0]):
                self._admit()  # who has come meanwhile is before this chat
                self.running.rotate(-1)
            else:
                self.running.popleft()

    def _admit(self) -> None:
        """Let chats that wait take turns, as many as may, and drop those whose clients have left."""
        with self._changed:
            for chat in list(self.waiting):
                if chat.gone or self._stopped or len(self.running) < self._chats:
                    self.waiting.remove(chat)
                    self.running.append((chat, self._work(chat)))

    def _turn(self, chat: Chat, work: Work) -> bool:
        """Run one forward of a chat, or end it; return whether more follow."""
        end: Exception | None = None
        try:
            if not (self._stopped or chat.gone):
                next(work)
                return True
            end = RequestError("the server shuts down; what was read is kept", status=503)
            work.close()
        except StopIteration:
            pass
        except Exception as error:
            end = error
        self._ended(chat)
        chat.send(end)
        return False

    def _work(self, chat: Chat) -> Work:
        """Read a prompt and draw its answer, a forward between two yields."""
        with self._store.open(chat.ids, tenant=chat.tenant) as found:
            chat.cached = first = found.tokens
            count, logits = FIRST, torch.empty(0, dtype=torch.float32, device="cpu")
            while (left := len(chat.ids) - first) > 0:
                size = left if left <= count + 1 else count  # a single token would be a decode step
                start = time.perf_counter()
                logits = self._forward(found, chat.ids[first : first + size])
                count = min(max(int(size * TURN / (time.perf_counter() - start)), LEAST), MOST)
                first += size
                if size < left:
                    yield
            try:
                yield from self._draw(chat, found, logits) if chat.most else ()
            except GeneratorExit:  # the client has left, or the server stops
                found.keep([[*chat.ids, *chat.drawn]])
                raise
            found.keep([[*chat.ids, *chat.drawn]])

    def _draw(self, chat: Chat, found: Found, logits: torch.Tensor) -> Work:
        ids = torch.tensor([chat.ids], dtype=torch.int64, device=logits.device)
        sampler, answer = Sampler(chat.how, ids), chat.answer
        while True:
            chat.drawn.append(sampler.draw(logits))
            ended = chat.drawn[-1] in self._eos
            for delta in () if ended else answer.add(chat.drawn[-1]):
                chat.send(delta)
            if ended or answer.stopped or len(chat.drawn) == chat.most:
                break
            yield
            logits = self._forward(found, chat.drawn[-1:])
        for delta in answer.end():
            chat.send(delta)
        chat.reason = "tool_calls" if answer.calls else "stop" if ended or answer.stopped else "length"

    def _forward(self, found: Found, ids: Sequence[int]) -> torch.Tensor:
        found.resume()
        return self._logits(found.cache, ids)

    def _logits(self, cache: Any, ids: Sequence[int]) -> torch.Tensor:
        """The logits `[1, vocabulary]` after some tokens."""
        given = torch.tensor([ids], dtype=torch.int64, device=self._model.device)
        logits: torch.Tensor = self._model(given, **self._last_alone, **cache_argument(self._model, cache)).logits
        return logits[:, -1]

    def _warm(self) -> None:
        """Compile what prompts, forks, appends and decode steps need: seconds, or once a machine half a minute."""
        most = getattr(self._model.config.get_text_config(decoder=True), "max_position_embeddings", None) or WARM
        ids, cache = [3 + i % 50 for i in range(min(WARM, most - 8))], self._store.new_cache()
        for part in (ids[:FIRST], ids[:1], ids[FIRST:]):
            self._logits(cache, part)
        cache = cache.fork()
        for part in (ids[:3], ids[:1], ids[:1]):
            self._logits(cache, part)
