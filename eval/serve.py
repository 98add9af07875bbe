"""What does a server that keeps what it has read spare, beside llama.cpp's server on the same weights?

    python eval/serve.py --llama-server build/bin/llama-server
    python eval/serve.py --tokens 1k --chats 1,2 --repeats 1

A document and a question are answered, the server is killed and started again, and the document is asked about once
more: seconds to the first token of that second turn. The server does nothing but to start. *By hand* somebody keeps the
cache: here a script with a `PrefixStore`, there requests that save and restore a slot. Then several chats about the
document are answered at once: tokens a second of all together, while all of them answer.

Without `--llama-server` its row is left out. Built from the sources of llama-cpp-python's package, it is a program of
`vendor/llama.cpp`: `cmake -B build -DGGML_NATIVE=ON -DLLAMA_BUILD_SERVER=ON` and `cmake --build build -t llama-server`.
Both read the same weights in bfloat16, which that package writes. A document that llama.cpp has read for one chat is
restored for the others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
import typer

import common
import hf_offload
from hf_offload.tools.assets import find_smollm2
from peers import LLAMA, OURS, tokenizer_of, write_bfloat16
from records import show
from save_load import QUESTIONS, turns

ROOM = 2048
"""Tokens of the context beside the document."""
PATIENCE = 15
"""Seconds in which a prompt is saved; a short one that is soon read never is."""


@dataclass
class Answer:
    """One answer: seconds from the request to each token, and what the server says of it."""

    times: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


class Server:
    """A server as a process of its own, whose requests have some more fields; `with` starts it and kills it."""

    def __init__(self, command: list[str], **more: Any) -> None:
        self.command, self.more = command, more

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*self.command, "--port", str(port)], stderr=subprocess.DEVNULL)
        while self.process.poll() is None:
            with contextlib.suppress(OSError):  # until it listens, and is ready
                self.get("/health")
                return self
            time.sleep(0.1)
        raise typer.BadParameter(f"{self.command[0]} has ended with {self.process.returncode}")

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The response to a request, with a body if there is one."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(asked, timeout=7200)

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What a path gives."""
        with self.open(path, body) as response:
            return str(response.read().decode())

    def ask(self, ids: list[int], tokens: int, **more: Any) -> Answer:
        """The greedy answer to a prompt, of so many tokens."""
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True, **self.more, **more}
        body["stream_options"] = {"include_usage": True}
        answer, start = Answer(), time.perf_counter()
        with self.open("/v1/completions", body) as response:
            for line in response:
                part = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                answer.usage = part.get("usage") or answer.usage
                if text := "".join(choice.get("text") or "" for choice in part.get("choices", ())):
                    answer.times.append(time.perf_counter() - start)
                    answer.text += text
        return answer


def until_saved(server: Server) -> None:
    """Wait until a prompt survives a kill."""
    end = time.monotonic() + PATIENCE
    while "hf_offload_saved_prompts_total 0\n" in server.get("/metrics") and time.monotonic() < end:
        time.sleep(0.1)


def at_once(server: Server, prompts: list[list[int]], tokens: int, slots: bool) -> float:
    """Tokens a second of answers to prompts that are sent together, from when the last of them has begun until the
    first one ends.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        named = ({"id_slot": slot} if slots else {} for slot in itertools.count())
        asked = [pool.submit(server.ask, prompt, tokens, **more) for prompt, more in zip(prompts, named, strict=False)]
    every = [each.result().times for each in asked]
    begin = max(times[0] for times in every)
    end = max(min(times[-1] for times in every), begin + 1e-9)
    return sum(begin < at <= end for times in every for at in times) / (end - begin)


class Texts:
    """The prompts: a document's first tokens, each with a question."""

    def __init__(self, setting: common.TextSetting, kind: str, tokens: int) -> None:
        self._tokenizer = tokenizer_of(setting.model)
        self.document: list[int] = setting.window(self._tokenizer, kind, 0, tokens)[0].tolist()
        self.eos = self._tokenizer.eos_token_id

    def __call__(self, *texts: str) -> list[int]:
        """The document and what comes behind it, piece by piece."""
        pieces = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        return [*self.document, *(token for piece in pieces for token in piece)]

    def second(self, answer: str, number: int) -> list[int]:
        """A second turn, another one each time."""
        return self(QUESTIONS[0], f"{answer}{QUESTIONS[1]} {number}")

    def chats(self, count: int) -> list[list[int]]:
        """So many chats about the document."""
        return [self(f"\n\nQuestion {number}: {QUESTIONS[2].strip()}") for number in range(count)]


def of_ours(
    setting: common.TextSetting, texts: Texts, chats: list[int], answers: int, repeats: int, folder: Path
) -> dict[str, Any]:
    """The row of hf_offload."""
    command = [sys.executable, "-m", "hf_offload_cli", "serve", *([setting.model] if setting.model else [])]
    command += ["--dtype", setting.dtype, "--store", str(folder), "--chats", str(max(chats))]
    command += ["--max-context", str(len(texts.document) + ROOM)]
    server, seconds = Server(command, logit_bias={str(texts.eos): -100}), []
    with server:
        read = server.ask(texts(QUESTIONS[0]), answers)
        until_saved(server)
    for number in range(repeats):
        with server:
            second = server.ask(texts.second(read.text, number), 2)
            seconds.append(second.times[0])
    with server:
        server.get("/v1/prefixes", {"prompt": texts.document})
        rates = {f"tokens_per_s_{n}": at_once(server, texts.chats(n), answers, False) for n in chats}
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    return {"read_s": read.times[0], "first_token_s": float(np.median(seconds)), "cached_tokens": cached, **rates}


def by_hand(setting: common.TextSetting, texts: Texts, repeats: int) -> float:
    """Seconds to the first token of a second turn in a script with a `PrefixStore`."""
    model, tokenizer = setting.load()
    model.set_attn_implementation("hybrid_sparse")
    if model.device.type == "cpu":
        hf_offload.fast_linear(model)
    row, ids = common.Row("scout", "scout"), torch.tensor([texts.document], device=model.device)
    turns(model, tokenizer, row, ids[:, :1200], 1)  # compiles the kernels
    return turns(model, tokenizer, row, ids, repeats)["turn_disk_s"]


def of_llama(
    program: Path, gguf: Path, threads: int, texts: Texts, chats: list[int], answers: int, repeats: int, folder: Path
) -> dict[str, Any]:
    """The row of llama.cpp's server."""
    context = len(texts.document) + ROOM
    command = [str(program), "-m", str(gguf), "-c", str(max(chats) * context), "-np", str(max(chats)), "-fa", "on"]
    command += ["-t", str(threads), "-tb", str(threads), "-b", "1024", "-ub", "1024", "--no-kv-unified", "-cram", "0"]
    command += ["--slot-save-path", f"{folder}/", "--override-kv", f"llama.context_length=int:{context}"]
    server, seconds, rates = Server(command, ignore_eos=True, cache_prompt=True), [], {}
    with server:
        read = server.ask(texts(QUESTIONS[0]), answers, id_slot=0)
        server.get("/slots/0?action=save", {"filename": "document"})
    with server:  # nothing is kept
        alone = server.ask(texts.second(read.text, 0), 2, id_slot=0)
    for number in range(repeats):
        with server:
            start = time.perf_counter()
            server.get("/slots/0?action=restore", {"filename": "document"})
            restored = time.perf_counter() - start
            seconds.append(restored + server.ask(texts.second(read.text, number), 2, id_slot=0).times[0])
    for count in chats:
        with server:
            for slot in range(count):
                server.get(f"/slots/{slot}?action=restore", {"filename": "document"})
            rates[f"tokens_per_s_{count}"] = at_once(server, texts.chats(count), answers, True)
    cached = (alone.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    found = {"read_s": read.times[0], "first_token_s": alone.times[0], "cached_tokens": cached}
    return found | {"by_hand_s": float(np.median(seconds)), **rates}


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the document; k is 1,024.")] = "16k",
    chats: Annotated[str, typer.Option(help="Chats at once, comma-separated.")] = "1,4,8",
    answers: Annotated[int, typer.Option(min=4, help="Tokens of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Times that a second turn is asked.")] = 3,
    kind: common.KindOption = "documentation",
    llama_server: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="llama.cpp's server.")] = None,
    gguf: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Its weights for --model.")] = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Measure a server's second turn after a kill, and several chats at once."""
    (length,), counts, (text,) = common.numbers(tokens), common.numbers(chats), common.kinds_of(kind)
    if llama_server is not None and setting.model is not None and gguf is None:
        raise typer.BadParameter("--gguf names llama.cpp's weights for another --model")
    texts = Texts(setting, text, length)
    about = {"tokens": length, "answers": answers, "repeats": repeats, "kind": text}
    with tempfile.TemporaryDirectory() as scratch:
        if llama_server is not None and gguf is None:
            gguf = Path(scratch) / "bfloat16.gguf"
            write_bfloat16(find_smollm2(), gguf)
        found = of_ours(setting, texts, counts, answers, repeats, Path(scratch) / "store")
        records = [{"way": OURS, **about, **found, "by_hand_s": by_hand(setting, texts, repeats)}]
        if llama_server is not None and gguf is not None:
            threads = setting.threads or torch.get_num_threads()
            found = of_llama(llama_server, gguf, threads, texts, counts, answers, repeats, Path(scratch))
            records.append({"way": LLAMA, **about, **found})
    setting.write(records)
    show("first token of a second turn after a kill, in seconds; tokens a second of chats at once", records)


if __name__ == "__main__":
    common.command(main)()
