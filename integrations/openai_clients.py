"""Clients of OpenAI's API ask a server with SmolLM2, each as its users do: `make serve-check`.

    python integrations/openai_clients.py PORT COMMAND …

COMMAND starts the server at PORT; without it the server runs already. A line for each client; it ends with 1 if one
fails. The clients have an environment of their own: openai, langchain-openai, litellm, llm, huggingface_hub.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

BASE = f"http://127.0.0.1:{sys.argv[1] if len(sys.argv) > 1 else 8000}/v1"
MESSAGES: list[Any] = [{"role": "user", "content": "Say hi."}]
os.environ |= {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
failed: list[str] = []


def check(name: str, ask: Callable[[], Any]) -> None:
    try:
        found = ask()
        assert found, "nothing came"
        print(f"{name:28} {str(found)[:80]!r}", flush=True)
    except Exception as error:
        failed.append(name)
        print(f"{name:28} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)


def openai_python() -> None:
    import openai

    client = openai.OpenAI(base_url=BASE, max_retries=0)
    create = client.chat.completions.create
    check("openai", lambda: create(model="x", messages=MESSAGES, max_tokens=8).choices[0].message.content)
    check(
        "openai stream",
        lambda: [
            part.usage.prompt_tokens_details.cached_tokens + 1
            for part in create(
                model="x", messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
            if part.usage
        ],
    )
    check(
        "openai completions", lambda: client.completions.create(model="x", prompt="Hello", max_tokens=8).choices[0].text
    )
    check("openai models", lambda: client.models.retrieve(client.models.list().data[0].id).id)

    def refused() -> Any:
        try:
            create(model="x", messages=MESSAGES, n=2)
        except openai.BadRequestError as error:
            return error.param

    check("openai refused", refused)


def langchain() -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ChatOpenAI(model="x", base_url=BASE, max_tokens=24)
    check("langchain", lambda: model.invoke("Say hi.").content)
    check("langchain stream", lambda: "".join(str(part.content) for part in model.stream("Say hi.")))
    check(
        "langchain tools", lambda: model.bind_tools([add]).invoke("What is 2 + 3?").response_metadata["finish_reason"]
    )


def litellm_client() -> None:
    import litellm

    litellm.suppress_debug_info = True
    options: dict[str, Any] = {"model": "openai/x", "api_base": BASE, "messages": MESSAGES, "max_tokens": 8}
    check("litellm", lambda: litellm.completion(**options).choices[0].message.content)
    check(
        "litellm stream",
        lambda: "".join(part.choices[0].delta.content or "" for part in litellm.completion(**options, stream=True)),
    )


def llm() -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = f'- {{model_id: local, model_name: x, api_base: "{BASE}"}}\n'
        Path(folder, "extra-openai-models.yaml").write_text(entry, encoding="utf-8")
        command = [str(Path(sys.executable).with_name("llm")), "-m", "local", "-o", "max_tokens", "8", "Say hi."]
        environment = os.environ | {"LLM_USER_PATH": folder, "LLM_LOAD_PLUGINS": ""}
        for more in ([], ["--no-stream"]):
            run = [*command, *more, "--key", "none"]
            check(
                f"llm {' '.join(more)}",
                lambda run=run: subprocess.run(
                    run, env=environment, capture_output=True, text=True, check=True, timeout=120
                ).stdout.strip(),
            )


def hub() -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=BASE, api_key="none")
    check("huggingface_hub", lambda: client.chat_completion(MESSAGES, max_tokens=8).choices[0].message.content)
    check(
        "huggingface_hub stream",
        lambda: "".join(
            part.choices[0].delta.content or ""
            for part in client.chat_completion(MESSAGES, max_tokens=8, stream=True)
            if part.choices
        ),
    )


def curl() -> None:
    body = '{"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 8, "stream": true}'
    command = ["curl", "-sN", f"{BASE}/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    check("curl -N", lambda: text.rstrip().endswith("data: [DONE]") and text[:80])


def start() -> subprocess.Popen[bytes] | None:
    """The server of the command line, when it is ready."""
    server = subprocess.Popen(sys.argv[2:]) if sys.argv[2:] else None
    while True:
        try:
            urllib.request.urlopen(BASE.removesuffix("/v1") + "/health")
            return server
        except OSError:
            assert server is None or server.poll() is None, "the server has ended"
            time.sleep(0.2)


if __name__ == "__main__":
    server = start()
    for client in (openai_python, langchain, litellm_client, llm, hub, curl):
        try:
            client()
        except Exception as error:
            failed.append(client.__name__)
            print(f"{client.__name__:28} FAILED {type(error).__name__}: {error}", flush=True)
    if server is not None:
        server.terminate()
        server.wait(60)
    print(f"{len(failed)} failed" if failed else "all answer")
    sys.exit(bool(failed))
