"""A server is asked about a long document, killed in its answer, started and asked again: the document is read once.

    python examples/served_chat.py
    python examples/served_chat.py --model Qwen/Qwen3-0.6B --question "Which function copies a file?"

What was read lies in the folder served_chat; `hf-offload store ls --folder served_chat` lists it.
"""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from typing import Annotated, Any

import typer

import hf_offload

BASE = "http://127.0.0.1:8123"
SAVED = b"hf_offload_saved_prompts_total 0\n"
COMMAND = [sys.executable, "-m", "hf_offload_cli", "serve", "--store", "served_chat", "--port", "8123"]


def get(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(BASE + path, data, {"Content-Type": "application/json"}))


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    question: Annotated[str, typer.Option(help="Your question.")] = "What is this text about?",
) -> None:
    text = f"{hf_offload.demo_text('documentation')[:24_000]}\n\n{question}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "stream": True}
    for kill in (True, False):
        with subprocess.Popen([*COMMAND, *([model] if model else [])]) as server:
            while server.poll() is None:
                with contextlib.suppress(OSError):  # until it listens, and its kernels are compiled
                    get("/health")
                    break
                time.sleep(0.1)
            first, since = "", time.perf_counter()
            for line in get("/v1/chat/completions", body | {"stream_options": {"include_usage": True}}):
                part = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
                answer = "".join(choice["delta"].get("content", "") for choice in part["choices"])
                print(answer, end="", flush=True)
                first = first or (f"[first token after {time.perf_counter() - since:.2f} s]" if answer else "")
                if usage := part.get("usage"):
                    print(f"\n{usage['prompt_tokens_details']['cached_tokens']:,} of {usage['prompt_tokens']:,} kept")
                if first and kill and SAVED not in get("/metrics").read():
                    break
            server.kill()
            print(f"\n{first}{' [killed]' if kill else ''}")


if __name__ == "__main__":
    typer.run(main)
