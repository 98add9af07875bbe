"""A server is asked about a long document, killed in its answer, started and asked again: the document is read once.

    python examples/served_chat.py
    python examples/served_chat.py --model Qwen/Qwen3-0.6B --file novel.txt --question "Who marries whom?"

What was read lies in the folder served_chat; `hf-offload store ls --folder served_chat` lists it. It holds the text:
remove it when you no longer want it.
"""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_offload

QUESTION = "What is this text about?"


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}))


def start(model: str | None, folder: Path, port: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "hf_offload_cli", "serve", *([model] if model else [])]
    server = subprocess.Popen([*command, "--store", str(folder), "--port", str(port)], stderr=subprocess.DEVNULL)
    while server.poll() is None:
        with contextlib.suppress(OSError):  # until it listens, and its kernels are compiled
            get(f"http://127.0.0.1:{port}/health")
            return server
        time.sleep(0.1)
    raise SystemExit(f"the server ended with {server.returncode}; `{' '.join(command)}` says why")


def ask(text: str, port: int) -> tuple[float, Any]:
    """Seconds until the first token, and the rest of the stream."""
    since = time.perf_counter()
    messages = [{"role": "user", "content": text}]
    usage = {"include_usage": True}
    body = {"messages": messages, "max_tokens": 60, "stream": True, "stream_options": usage}
    stream = get(f"http://127.0.0.1:{port}/v1/chat/completions", body)
    for line in stream:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            print(json.loads(line[6:])["choices"][0]["delta"]["content"], end="")
            break
    return time.perf_counter() - since, stream


def saved(port: int) -> bool:
    lines = get(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines()
    return any(line.startswith("hf_offload_saved_prompts_total") and not line.endswith(" 0") for line in lines)


def main(
    model: Annotated[str | None, typer.Option(help="A chat model: hub name or folder (SmolLM2 if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your document.")] = None,
    question: Annotated[str, typer.Option(help="Your question.")] = QUESTION,
    port: Annotated[int, typer.Option(help="A free port.")] = 8123,
) -> None:
    text = file.read_text(encoding="utf-8") if file else hf_offload.demo_text("documentation")[:24_000]
    folder, times = Path("served_chat"), []
    for kill in (True, False):
        server = start(model, folder, port)
        try:
            seconds, stream = ask(f"{text}\n\n{question}", port)
            times.append(seconds)
            while kill and not saved(port):
                time.sleep(0.05)
            if not kill:
                parts = [json.loads(line[6:]) for line in stream if line.startswith(b"data: {")]
                print("".join(part["choices"][0]["delta"].get("content", "") for part in parts if part["choices"]))
                usage = parts[-1]["usage"]
        finally:
            server.kill()
            server.wait()
        print("\n[killed]" if kill else "", flush=True)
    cached, count = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
    print(f"first token after {times[0]:.2f} s; after a kill and a start, after {times[1]:.2f} s")
    print(f"the second time {cached:,} of {count:,} tokens were not read again")


if __name__ == "__main__":
    typer.run(main)
