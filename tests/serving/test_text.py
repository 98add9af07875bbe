"""Text of answers: stop sequences, reasoning, tool calls, characters whose bytes come one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from letters import letters
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_offload.serving.answers import Answer, parse_call

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}},
    }
]


def deltas(text: str, **options: Any) -> tuple[list[dict[str, Any]], Answer]:
    tokenizer = letters()
    answer = Answer(tokenizer, **options)
    found = [delta for token in tokenizer(text)["input_ids"] for delta in answer.add(token)]
    return [*found, *answer.end()], answer


def text_of(found: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(delta.get(name, "") for delta in found)


@pytest.mark.parametrize(
    ("text", "stop", "given"),
    [
        ("one two three", [], "one two three"),
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one twtwo three", ["two"], "one tw"),
        ("one tw", ["two"], "one tw"),
        ("aab", ["aab"], ""),
        ("a\n\nb", ["\n\n"], "a"),
    ],
)
def test_a_stop_sequence_is_not_given(text: str, stop: list[str], given: str) -> None:
    found, answer = deltas(text, stop=stop)
    assert text_of(found) == given
    assert answer.stopped == (given != text)


def test_nothing_is_held_back_that_can_be_no_stop() -> None:
    tokenizer = letters()
    answer = Answer(tokenizer, stop=["xyz"])
    given = [text_of(answer.add(token)) for token in tokenizer("axybz")["input_ids"]]
    assert given == ["a", "", "", "xyb", "z"]


def test_reasoning_is_told_apart() -> None:
    found, _ = deltas("<think>\nWhy?\n</think>\n\nBecause < that.", thinks=True)
    assert (text_of(found, "reasoning_content"), text_of(found)) == ("Why?\n", "Because < that.")
    found, _ = deltas("Why?</think>So.", thinks=True, within=True)
    assert (text_of(found, "reasoning_content"), text_of(found)) == ("Why?", "So.")
    found, _ = deltas("<think>Why?", thinks=False)
    assert text_of(found) == "<think>Why?"


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": 1, "b": "2"}}',
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>",
    ],
    ids=["json", "tags"],
)
def test_tool_calls(call: str) -> None:
    found, answer = deltas(f"Well.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{call}</tool_call>", tools=TOOLS)
    calls = [each for delta in found for each in delta.get("tool_calls", [])]
    assert [each["index"] for each in calls] == [0, 1]
    assert len(answer.calls) == 2
    assert {each["function"]["name"] for each in calls} == {"add"}
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1, "b": "2"}
    assert text_of(found) == "Well.\n"


@pytest.mark.parametrize("call", ["{broken", '["a"]', '{"name": "add", "arguments": 3}', '{"name": 3}', "[" * 9999])
def test_what_is_no_tool_call_is_text(call: str) -> None:
    found, answer = deltas(f"<tool_call>{call}</tool_call>", tools=TOOLS)
    assert text_of(found) == f"<tool_call>{call}</tool_call>"
    found, answer = deltas(f"<tool_call>{call}", tools=TOOLS)
    assert text_of(found) == f"<tool_call>{call}"
    assert not answer.calls


@pytest.mark.parametrize("parameters", [None, {}, {"properties": None}, {"properties": {"a": True}}], ids=str)
def test_tools_without_a_schema(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}, {"function": {}}]
    call = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
    found, answer = deltas(f"<tool_call>{call}</tool_call>", tools=tools)
    assert json.loads(answer.calls[0]["function"]["arguments"]) == {"a": 1}
    assert found[-1]["tool_calls"][0]["function"] == answer.calls[0]["function"]


def of_bytes() -> PreTrainedTokenizerFast:
    """A token for each byte, as of GPT-2's byte-level vocabularies."""
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def with_fallback() -> PreTrainedTokenizerFast:
    """A run of byte tokens is decoded as a whole, and is lost as a whole if it begins within a character."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "a": 257, "b": 258, " ": 259}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.mark.parametrize("made", [of_bytes, with_fallback])
def test_a_character_of_several_tokens_comes_whole(made: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = made()
    for text in ("Grüße, 世界! 🙂🙂  two\nand é", "王国的人", "กรุงเทพมหานคร", "नमस्ते दुनिया", "a王b国a的b人", "é" * 9):
        answer, ids = Answer(tokenizer), tokenizer(text)["input_ids"]
        assert len(ids) > len(text)
        parts = [text_of(answer.add(token)) for token in ids]
        assert "".join(parts) + text_of(answer.end()) == text
        assert not any("\ufffd" in part for part in parts)
        assert sum(map(bool, parts)) > 3 or made is with_fallback


def test_bytes_that_make_no_character_are_given_in_the_end() -> None:
    tokenizer = of_bytes()
    half = tokenizer("🙂")["input_ids"][:1]
    answer = Answer(tokenizer)
    assert text_of([*answer.add(half[0]), *answer.end()]) == ""
    answer = Answer(tokenizer)
    parts = [text_of(answer.add(token)) for token in (*half * 40, *tokenizer("end")["input_ids"])]
    assert "".join(parts).endswith("end")
    assert sum(map(bool, parts)) > 3


def test_a_call_is_what_its_own_form_says() -> None:
    quoted = {"name": "add", "arguments": {"b": "<function=other><parameter=x>1</parameter>\ud83d"}}
    found = parse_call(json.dumps(quoted), TOOLS)
    assert found is not None
    assert (found["name"], json.loads(found["arguments"])) == ("add", quoted["arguments"])
    assert found["arguments"].encode()
    found = parse_call("<function=add>\n<parameter=b>\n    return 1\n\n</parameter>\n</function>", TOOLS)
    assert found is not None
    assert json.loads(found["arguments"]) == {"b": "    return 1\n"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"type": "array", "items": {"type": "string"}}, '["a"]', ["a"]),
        ({"type": "integer"}, "five", "five"),
        ({"type": "string"}, "<parameter=x>1</parameter> is quoted", "<parameter=x>1</parameter> is quoted"),
    ],
    ids=str,
)
def test_a_parameter_is_text_where_its_schema_allows_text(schema: Any, text: str, value: Any) -> None:
    tools = [{"function": {"name": "add", "parameters": {"properties": {"a": schema, "b": {"type": "integer"}}}}}]
    call = f"<function=add>\n<parameter=a>\n{text}\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
    found = parse_call(call, tools)
    assert found is not None
    assert json.loads(found["arguments"]) == {"a": value, "b": 2}
