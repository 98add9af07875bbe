"""`Answer`: the text of an answer as its tokens come; stop sequences, reasoning and tool calls are told apart."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Delta = dict[str, Any]
"""A part of a message, as OpenAI's streams have it: `content`, `reasoning_content` or `tool_calls`."""
THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
"""What opens and closes reasoning and tool calls: Qwen, Hermes, SmolLM3, DeepSeek-R1 and models trained like them."""
PENDING = 8
"""Tokens after which bytes that make no character are given as they are."""


class Answer:
    """The deltas of an answer.

    Args:
        tokenizer: the model's.
        stop: texts that end the answer and are not given.
        thinks: whether `<think>` opens reasoning; within: whether the prompt has opened it.
        tools: the tools that may be called, as requests name them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop: Sequence[str] = (), thinks: bool = False,
        within: bool = False, tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        self._tokenizer, self._stop, self._tools = tokenizer, [*filter(None, stop)], tools
        self._marks = [mark for mark, wanted in ((THINK, thinks), (CALL, bool(tools))) if wanted]
        self._region, self._first = THINK if within else None, within  # nothing of this part was given yet
        self._ids, self._read, self._held = list[int](), 0, ""
        self.stopped, self.calls = False, list[dict[str, Any]]()
        """Whether a stop sequence has come; the tool calls."""

    def add(self, token: int) -> list[Delta]:
        """Return what a token adds; what may be the beginning of a mark, or of a character, is held back."""
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._read]), self._decode(self._ids)
        if not now.endswith("\ufffd") or len(self._ids) - self._read > PENDING:
            self._ids = self._ids[-8:]  # a token's text may depend on those before it
            self._read, self._held = len(self._ids), self._held + now[len(before) :]
        return list(self._split())

    def end(self) -> list[Delta]:
        """Return what was held back, but for a character's first bytes."""
        now = self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :].rstrip("\ufffd")
        text = (CALL[0] if self._region is CALL else "") + self._held + now
        return [] if self.stopped else list(self._give(text))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _split(self) -> Iterator[Delta]:
        while not self.stopped:
            stop = [] if self._region is CALL else self._stop
            marks = [*stop, *([mark for mark, _ in self._marks] if self._region is None else self._region[1:])]
            found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            if not found:
                if self._region is not CALL:
                    cut = len(self._held) - max((_overlap(self._held, mark) for mark in marks), default=0)
                    text, self._held = self._held[:cut], self._held[cut:]
                    yield from self._give(text)
                return
            at, mark = min(found)
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            yield from self._call(text) if self._region is CALL else self._give(text)
            self.stopped, self._first = mark in stop, True
            self._region = next((each for each in self._marks if each[0] == mark), None)

    def _give(self, text: str) -> Iterator[Delta]:
        text = text.lstrip() if self._first else text  # lines between the parts of a message belong to none
        if text:
            self._first = False
            yield {"reasoning_content" if self._region is THINK else "content": text}

    def _call(self, text: str) -> Iterator[Delta]:
        function = parse_call(text, self._tools)
        if function is None:
            yield {"content": CALL[0] + text + CALL[1]}
        else:
            self.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            yield {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of a text with which a mark begins."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def parse_call(text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return name and arguments (as JSON) of a tool call, JSON or Qwen3.5's tags; None if it is neither."""
    try:
        if named := re.search(r"<function=([^>\n]+)>", text):
            pairs = re.findall(r"<parameter=([^>\n]+)>\s*(.*?)\s*</parameter>", text, re.DOTALL)
            schemas = next((x["function"].get("parameters") for x in tools if x["function"]["name"] == named[1]), None)
            kinds = (schemas or {}).get("properties") or {}
            name, arguments = named[1], {key: _value(value, kinds.get(key)) for key, value in pairs}
        else:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _value(text: str, schema: Any) -> Any:
    """A parameter's value by its schema: a string is itself, all else is JSON."""
    try:
        return text if isinstance(schema, dict) and schema.get("type") == "string" else json.loads(text)
    except (ValueError, RecursionError):
        return text
