"""Clients that leave, over real connections: their work ends at the next turn, and what was computed is kept."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from letters import letters
from tiny import tiny_model

from hf_offload import PrefixStore

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
from hf_offload.serving.app import Service  # noqa: E402
from hf_offload.serving.turns import Chat  # noqa: E402


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class Running:
    """A server in a thread, on a tiny model whose forwards take some time."""

    def __init__(self, folder: Path, *, pause: float = 0.05, chats: int = 1, **options: Any) -> None:
        model, tokenizer = tiny_model("llama"), letters()
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        self.store = PrefixStore(folder, model, "full", block_size=16, **{"min_seconds": 1000, **options})
        self.service = Service(model, tokenizer, self.store, "tiny", 8000, chats=chats)
        self.engine = self.service.engine
        self.engine.warmed.result()
        model.register_forward_pre_hook(lambda *_: time.sleep(pause))
        self.server = uvicorn.Server(uvicorn.Config(self.service.app, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.engine.close()
        self.store.close()

    @property
    def chats(self) -> list[Chat]:
        return list(self.engine.chats.values())

    def ask(self, text: str, stream: bool, **more: Any) -> socket.socket:
        body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": stream, **more}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_a_client_that_leaves_ends_its_work(running: Running, where: str, stream: bool) -> None:
    text = "x" * 4000 if where == "prompt" else "a tale of two cities"
    connection = running.ask(text, stream)
    until(lambda: running.chats)
    (chat,) = running.chats
    if where == "answer":
        until(lambda: len(chat.drawn) > 3)
    else:
        until(lambda: chat.cached is not None)
    connection.close()
    until(lambda: not running.chats)
    running.engine._thread.submit(int).result()  # what was computed is kept
    kept = len(text) + len(chat.drawn) - 1
    if where == "prompt":
        kept = max(len(entry.ids) for entry in running.store._held)
        assert 64 <= kept < 4000
    assert len(chat.drawn) < 100
    with running.store.open([*chat.ids, *chat.drawn, 7, 7, 7]) as found:
        assert found.tokens == kept


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_the_queue_is_never_read(running: Running, stream: bool) -> None:
    first = running.ask("first", True)
    until(lambda: len(running.chats) == 1)
    second = running.ask("second", stream)
    until(lambda: len(running.chats) == 2)
    chat = running.chats[1]
    second.close()
    until(lambda: len(running.chats) == 1)
    first.close()
    until(lambda: not running.chats)
    assert chat.cached is None


@pytest.mark.slow
def test_a_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """Of four clients, some of which leave early: memory, threads and descriptors stay as they are."""
    running = Running(tmp_path, pause=0, chats=3, max_ram="2MiB", max_bytes="4MiB", min_seconds=0.05)
    process, seen = psutil.Process(), list[tuple[int, int, int]]()

    def client(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(250):
            text = "".join(dice.choice("abcdef ") for _ in range(dice.randint(5, 400)))
            with running.ask(text, dice.random() < 0.5, max_tokens=6) as connection:
                connection.settimeout(60)
                data = b"[DONE]" if dice.random() < 0.2 else b""
                while b"[DONE]" not in data and b'"usage"' not in data:
                    data += connection.recv(65536)
            seen.append((process.memory_info().rss, process.num_threads(), process.num_fds()))

    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(client, range(4)))
    finally:
        running.close()
    assert len(seen) == 1000
    (memory, thread_count, files), last = seen[300], seen[-1]
    assert last[0] < memory + (32 << 20)
    assert last[1] <= thread_count + 2
    assert last[2] <= files + 16
