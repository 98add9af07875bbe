"""`hf-offload serve` as a process: SmolLM2 answers, is killed, answers again; signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_offload

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Process:
    """A server; `with` kills it at its end."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        line = [sys.executable, str(ROOT / "hf_offload_cli.py"), "serve", "--store", str(folder)]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen([*line, "--port", str(self.port), *options], env=environment)

    def wait(self) -> None:
        """Until it listens, and its kernels are compiled."""
        end = time.monotonic() + 300
        while True:
            assert self.process.poll() is None
            assert time.monotonic() < end
            with contextlib.suppress(OSError):
                self.get("/health")
                break
            time.sleep(0.05)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=120) as response:
            text: str = response.read().decode()
            return text

    def open(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(asked, timeout=300)

    def chat(self, question: str, **more: Any) -> Any:
        text = hf_offload.demo_text("documentation")[:9000]
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        return self.open("/v1/chat/completions", {"messages": messages, "max_tokens": 8, **more})

    def saved(self) -> int:
        numbers = dict(line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if line[0] != "#")
        return int(numbers["hf_offload_saved_prompts_total"])


@contextlib.contextmanager
def serve(folder: Path, *options: str) -> Iterator[Process]:
    process = Process(folder, *options)
    try:
        process.wait()
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def test_what_a_killed_server_has_read_is_not_read_again(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        stream = server.chat("What is this?", stream=True, max_tokens=500)
        while not server.saved():
            time.sleep(0.1)
        server.process.kill()
        stream.close()
    with serve(tmp_path) as server:
        killed = json.load(server.chat("What is this?"))
    usage = killed["usage"]
    assert usage["prompt_tokens"] > 1500
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 64
    with serve(tmp_path / "other") as server:
        json.load(server.chat("What is this?", max_tokens=1))
        whole = json.load(server.chat("What is this?"))
    assert whole["usage"] == usage
    assert whole["choices"] == killed["choices"]


def test_signals(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        stream = server.chat("What is this?", stream=True, max_tokens=2000)
        for line in stream:
            if b'"content": "' in line and b'"content": ""' not in line:
                break
        server.process.send_signal(signal.SIGTERM)
        rest = stream.read()
        assert b"shuts down" in rest
        assert server.process.wait(30) == 0
    assert list(tmp_path.glob("*/*/*"))
    with serve(tmp_path) as server:
        stream = server.chat("And what is that?", stream=True, max_tokens=2000)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
