"""The server over HTTP: answers in OpenAI's types, what is kept and for whom, what is refused."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import letters
from tiny import SIZES, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from hf_offload import HybridCache, PrefixStore
from hf_offload.model.hooks import cache_argument

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
types = pytest.importorskip("openai.types")
from fastapi.middleware.cors import CORSMiddleware  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

from hf_offload.serving import app as serving  # noqa: E402
from hf_offload.serving.app import Service  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.get('reasoning_content', '') }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONTEXT, LONG = 900, 1000


def tokenizer() -> Any:
    made = letters()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny_model("llama")
    made.config.max_position_embeddings = CONTEXT
    return made


@contextmanager
def serve(model: Any, folder: Path, **options: Any) -> Iterator[TestClient]:
    limits = {name: options.pop(name) for name in ("max_ram", "max_bytes", "min_seconds") if name in options}
    store = PrefixStore(folder, model, "full", block_size=16, **({"min_seconds": 0} | limits))
    service = Service(model, tokenizer(), store, "tiny", **{"max_context": CONTEXT, **options})
    with TestClient(service.app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        client.service = service  # type: ignore[attr-defined]
        service.engine.warmed.result()
        yield client
    service.engine.close()
    store.close()


@pytest.fixture(scope="module")
def client(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with serve(model, tmp_path_factory.mktemp("store")) as made:
        yield made


CHAT = "/v1/chat/completions"


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


def post(client: TestClient, body: dict[str, Any], path: str = CHAT, status: int = 200) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def content(client: TestClient, body: dict[str, Any]) -> str:
    """What a chat answers."""
    found: str = post(client, body)["choices"][0]["message"]["content"]
    return found


def counted(client: TestClient, body: dict[str, Any], path: str = CHAT) -> tuple[int, int]:
    """The tokens of a prompt, and how many of them were found."""
    usage = post(client, body, path)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_a_chat_is_the_models_own_answer_and_is_found_again(client: TestClient, model: Any) -> None:
    body = chat("Tell me a story about a king.")
    found = ChatCompletion.model_validate(post(client, body), strict=True)
    ids = tokenizer()("[user]Tell me a story about a king.\n[assistant]", return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0,
        **cache_argument(model, HybridCache(model, "full", block_size=16)),
    )  # fmt: skip
    text = tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert found.choices[0].message.content == text
    assert (found.model, found.choices[0].finish_reason) == ("any", "length")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (ids.shape[1], 12)
    again = post(client, body)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": ids.shape[1] - 2}
    assert again["choices"][0]["message"] == {"role": "assistant", "content": text}


def test_a_stream_gives_the_same_in_parts(client: TestClient) -> None:
    whole = content(client, chat("What is a sea?"))
    lines = events(client, CHAT, chat("What is a sea?", stream_options={"include_usage": True}))
    assert lines[-1] == "[DONE]"
    parts = [ChatCompletionChunk.model_validate(json.loads(line), strict=True) for line in lines[:-1]]
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == whole
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].choices == []
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 12
    plain = [json.loads(line) for line in events(client, CHAT, chat("What is a sea?"))[:-1]]
    assert not any("usage" in part for part in plain)


def test_completions(client: TestClient) -> None:
    path, body = "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8}
    found = types.Completion.model_validate(post(client, body, path), strict=True)
    ids = tokenizer()("Once upon a time")["input_ids"]
    for prompt in (["Once upon a time"], ids, [ids]):
        same = post(client, {**body, "prompt": prompt}, path)
        assert same["choices"][0]["text"] == found.choices[0].text
    usage = post(client, {**body, "prompt": "O"}, path)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 8)
    parts = [json.loads(line)["choices"][0] for line in events(client, path, body)[:-1]]
    assert "".join(part["text"] for part in parts) == found.choices[0].text
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_a_stop_sequence_ends_an_answer(client: TestClient) -> None:
    whole = content(client, chat("A list of words"))
    stop = whole[4:6]
    body = chat("A list of words", stop=stop)
    found = post(client, body)["choices"][0]
    assert found["message"]["content"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"
    parts = [json.loads(line) for line in events(client, CHAT, body)[:-1]]
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == found["message"]["content"]


def test_seeds_give_the_same_answer_beside_others(client: TestClient) -> None:
    def ask(seed: int) -> str:
        return content(client, chat("Roll the dice", temperature=1.5, seed=seed, max_tokens=30))

    alone = [ask(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(ask, range(3))) == alone
    assert len(set(alone)) == 3


def test_a_document_that_was_read_ahead(client: TestClient) -> None:
    system = {"role": "system", "content": "The document. " * 20}
    first = post(client, {"messages": [system]}, "/v1/prefixes")
    assert first["object"] == "prefix"
    assert first["cached_tokens"] < 20
    asked = chat("What is it?")
    asked["messages"].insert(0, system)
    assert counted(client, asked)[1] == first["tokens"]
    second = post(client, {"prompt": "[system]" + system["content"]}, "/v1/prefixes")
    assert second["cached_tokens"] == second["tokens"] - 2
    for prompt in ("messages", '"messages"', ["messages"]):  # a prompt, not messages
        post(client, {"prompt": prompt, "user": "messages"}, "/v1/prefixes")


def test_reasoning_parts_tools_and_calls_of_earlier_turns(client: TestClient) -> None:
    messages = [{"role": "assistant", "reasoning_content": "x" * 40, "content": "y"}, {"role": "user", "content": "z"}]
    tokens, _ = counted(client, chat("") | {"messages": messages})
    assert tokens == len("[assistant]" + "x" * 40 + "y\n[user]z\n[assistant]")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = chat("") | {"messages": messages, "tools": tools}
    without, _ = counted(client, body | {"tool_choice": "none"})
    assert without == len("[user]one\ntwo\n[assistant]\n[tool]3\n[assistant]")
    assert counted(client, body | {"tool_choice": "auto"})[0] > without


def test_models_health_and_metrics(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert [types.Model.model_validate(each).id for each in listed["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["max_model_len"] == CONTEXT
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    post(client, chat("count me"))
    assert client.get("/health").json() == {"status": "ok"}
    text = client.get("/metrics").text
    numbers = {name: float(value) for name, value in re.findall(r"^hf_offload_(\S+) (\S+)$", text, re.M)}
    assert "# TYPE hf_offload_prompt_tokens_total counter\nhf_offload_prompt_tokens_total " in text
    for name in ("prompt_tokens_total", "cached_tokens_total", "generated_tokens_total", "store_ram_bytes"):
        assert numbers[name] > 0, name
    assert numbers["first_token_seconds_sum"] > 0 == numbers["chats_running"]
    buckets = [value for name, value in numbers.items() if name.startswith("first_token_seconds_bucket")]
    assert buckets == sorted(buckets)
    last = numbers['first_token_seconds_bucket{le="+Inf"}']
    assert buckets[-1] == last == numbers["first_token_seconds_count"] >= 1


REFUSED: list[dict[str, Any]] = [
    {"n": 2}, {"n": True}, {"logprobs": True}, {"logprobs": 0}, {"response_format": {"type": "json_object"}},
    {"generation_config": "{}"}, {"prompt": "x"}, {"tempereature": 1}, {"temperature": -1}, {"temperature": "hot"},
    {"top_k": 1.5}, {"max_tokens": True}, {"seed": 1 << 80}, {"stop": 3}, {"stop": ["x"] * 17}, {"stream": "yes"},
    {"stream_options": {"other": 1}}, {"logit_bias": {"9999": 1}}, {"logit_bias": {"5": 1000}},
    {"logit_bias": {"-5": 1}}, {"tools": ["f"]}, {"tools": [{"type": "web_search"}]}, {"parallel_tool_calls": False},
    {"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"messages": []}, {"messages": "hi"}, {"messages": [3]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"chat_template_kwargs": {"tokenize": False}}, {"chat_template_kwargs": {"messages": []}},
    {"chat_template_kwargs": {"padding": "max_length", "max_length": 1 << 40}},
]  # fmt: skip


def test_what_is_not_honoured_is_refused_by_name(client: TestClient) -> None:
    for change in REFUSED:
        error = post(client, chat("hello") | change, status=400)["error"]
        (param,) = change
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert param in error["message"]
    nothing = {
        "n": 1, "logprobs": False, "response_format": {"type": "text"}, "user": "u", "metadata": {}, "seed": None,
        "presence_penalty": 0, "frequency_penalty": 0, "store": False, "prompt_cache_key": "k", "top_k": -1,
    }  # fmt: skip
    post(client, chat("hello", **nothing))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/prefixes"])
def test_bodies_that_are_none(client: TestClient, path: str) -> None:
    for body in (b"", b"{", b"[]", b"3", b"{}", b"\xff", b"[" * 100_000, b'{"prompt": "x", "temperature": NaN}'):
        response = client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, body
        assert response.json()["error"]["message"]
    assert client.get(path).status_code == 405
    assert client.get(path).json()["error"]["type"] == "invalid_request_error"
    assert client.get("/nothing").json()["error"]["message"] == "Not Found"


def test_bodies_that_are_too_large(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many errors is refused at once."""
    for body in ({"prompt": [True] * 500_000}, {"prompt": [[1.5] * 500_000]}, {"prompt": "a", "top_k": 10**400}):
        assert len(str(post(client, body, "/v1/completions", 400))) < 500
    post(client, {"messages": [3] * 500_000}, status=400)
    monkeypatch.setattr(serving, "BODY", 1000)
    assert post(client, chat("x" * 2000), status=413)["error"]["type"] == "invalid_request_error"
    post(client, chat("x" * 10))


def test_an_error_within_an_answer(client: TestClient, model: Any) -> None:
    """It ends this answer alone, in OpenAI's form, in a stream and not."""
    sizes = list[int]()

    def fail(_: Any, args: Any) -> None:
        sizes.append(args[0].shape[1])
        if sizes.count(1) == 3:
            raise OSError("no more")

    told = {"message": "no more", "type": "server_error", "param": None, "code": None}
    with model.register_forward_pre_hook(fail):
        assert json.loads(events(client, CHAT, chat("An answer that fails"))[-1])["error"] == told
        sizes.clear()
        assert post(client, chat("One more of them"), status=500)["error"] == told
    tokens, cached = counted(client, chat("One more of them"))
    assert cached == tokens - 2
    assert not client.service.engine.chats  # type: ignore[attr-defined]


def test_titles_and_tags_push_no_chat_from_the_disk(model: Any, tmp_path: Path) -> None:
    """Side calls as Open WebUI sends them, beside a chat that takes all that the store may have."""
    task = "### Task:\nGenerate a concise, 3-5 word {}.\n### Chat History:\n<chat_history>\nUSER: {}\n</chat_history>"
    document = "A tale of two cities. " * 30
    with serve(model, tmp_path, max_ram=1, max_bytes=1) as client:  # within one entry
        store = client.service.store  # type: ignore[attr-defined]
        answer = {"role": "assistant", "content": content(client, chat(document))}
        store.flush()
        saved, store._min_seconds = store.saves, LONG  # side calls take less
        for kind in ("title", "tags", "follow-up", "query"):
            post(client, chat(task.format(kind, "Hello " * 9)))
        turn = chat(document)
        turn["messages"] += [answer, {"role": "user", "content": "And now?"}]
        assert counted(client, turn)[1] > len(document)
        assert (store.saves, store.evictions) == (saved, 0)


def test_a_prompt_that_is_too_long(client: TestClient) -> None:
    assert post(client, chat("x" * CONTEXT), status=400)["error"]["code"] == "context_length_exceeded"
    fits = post(client, chat("x" * (CONTEXT - 25), max_tokens=5000))
    assert fits["usage"]["total_tokens"] == CONTEXT
    assert fits["choices"][0]["finish_reason"] == "length"


def test_other_pages_and_bodies_are_refused(client: TestClient) -> None:
    for host, status in (
        ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("LOCALHOST", 200), ("evil.com", 403),
        ("evil.com:8000", 403), ("", 403), ("127.0.0.1.evil.com", 403), ("localhost.", 403),
    ):  # fmt: skip
        assert client.get("/v1/models", headers={"host": host}).status_code == status, host
    for kind, status in (("application/json; charset=utf-8", 200), ("text/plain", 415), ("", 415)):
        content = json.dumps(chat("hello"))
        response = client.post(CHAT, content=content, headers={"content-type": kind})
        assert response.status_code == status, kind
    response = client.options("/v1/models", headers={"origin": "http://a.com", "access-control-request-method": "GET"})
    assert "access-control-allow-origin" not in response.headers


def test_pages_that_may_ask_and_a_server_that_is_not_ready(model: Any, tmp_path: Path) -> None:
    store, ready = PrefixStore(tmp_path, model, "full", block_size=16), threading.Event()

    def wait(*_: Any) -> None:
        assert ready.wait(60)

    with model.register_forward_pre_hook(wait):
        service = Service(model, tokenizer(), store, "tiny", CONTEXT)
        service.app.add_middleware(CORSMiddleware, allow_origins=["http://a.com"], allow_methods=["*"])
        asked = {"origin": "http://a.com", "access-control-request-method": "POST"}
        with TestClient(service.app, base_url="http://127.0.0.1") as client:
            assert client.options("/v1/models", headers=asked).headers["access-control-allow-origin"] == "http://a.com"
            assert client.get("/health").status_code == 503
            ready.set()
            service.engine.warmed.result()
            assert client.get("/health").status_code == 200
    service.engine.close()
    store.close()


def test_keys_are_tenants(model: Any, tmp_path: Path) -> None:
    with serve(model, tmp_path, keys=["one", "two"]) as client:

        def ask(key: str, **more: Any) -> int:
            client.headers["authorization"] = f"Bearer {key}"
            return counted(client, chat("a secret text", **more))[1]

        assert [ask("one"), ask("two"), ask("one", cache_salt="s")] == [0, 0, 0]
        assert min(ask("one"), ask("two"), ask("one", cache_salt="s")) > 10
        for key in ("", "Bearer three", "one", "Basic one"):
            client.headers["authorization"] = key
            assert post(client, chat("hello"), status=401)["error"]["code"] == "invalid_api_key"
            assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == 200  # of anybody


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_and_turns(model: Any, tmp_path: Path) -> None:
    permits, sizes = threading.Semaphore(0), list[int]()

    def wait(_: Any, args: Any) -> None:
        sizes.append(args[0].shape[1])
        assert permits.acquire(timeout=60)

    with serve(model, tmp_path, chats=2, queue=1) as client, ThreadPoolExecutor(3) as threads:
        engine, answers = client.service.engine, list[Any]()  # type: ignore[attr-defined]
        with model.register_forward_pre_hook(wait):
            try:
                for number in range(3):
                    answers.append(threads.submit(post, client, chat("some text" * number, max_tokens=3)))
                    until(lambda number=number: len(engine.chats) > number)
                refused = client.post(CHAT, json=chat("more"))
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                text = client.get("/metrics").text
                assert "hf_offload_chats_running 2" in text
                assert "hf_offload_chats_waiting 1" in text
            finally:
                permits.release(1000)
            for answer in answers:
                answer.result()
        first, second, *others = sizes  # the prompts of two chats, their answers in turns, then the third's
        assert first == len("[user]\n[assistant]")
        assert second == len("[user]some text\n[assistant]")
        assert others[:4] == [1] * 4
        assert others[4] > 1


def test_a_server_that_stops_ends_its_chats_and_keeps_what_was_read(model: Any, tmp_path: Path) -> None:
    body = chat("a long text " * 10, max_tokens=400)
    with serve(model, tmp_path) as client, ThreadPoolExecutor(1) as threads:
        found = threads.submit(post, client, body, status=503)
        engine = client.service.engine  # type: ignore[attr-defined]
        until(lambda: any(len(each.drawn) > 3 for each in engine.chats.values()))
        client.portal.call(engine.stop)
        found.result()
        post(client, body, status=503)
    with serve(model, tmp_path) as client:
        tokens, cached = counted(client, chat("a long text " * 10))
        assert cached == tokens - 2


def test_a_long_prompt_is_read_in_chunks_and_pings(
    client: TestClient, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PING", 0.01)
    sizes = list[int]()
    with model.register_forward_pre_hook(lambda _, args: (sizes.append(args[0].shape[1]), time.sleep(0.05))[1]):
        assert ": ping" in events(client, CHAT, chat("w" * 800, max_tokens=2))
    *chunks, last = sizes
    assert len(chunks) > 1
    assert 800 <= sum(chunks) <= 800 + len("[user]\n[assistant]")
    assert min(chunks) > last == 1


def test_an_answer_that_memory_ends_is_asked_for_again(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    kinds = ["linear_attention", "full_attention"]  # its caches cannot be cropped
    config = AutoConfig.for_model("qwen3_5_text", **sizes, **linear, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse").eval()
    with serve(model, tmp_path) as client:
        whole = post(client, chat("some text"))

        def lacks_memory(_: Any, args: Any) -> None:
            if args[0].shape[1] == 1:
                raise MemoryError("no memory")

        with model.model.layers[1].register_forward_pre_hook(lacks_memory):  # the first has its token
            assert post(client, chat("some text"), status=503)["error"]["message"] == "no memory"
        assert post(client, chat("some text"))["choices"] == whole["choices"]
