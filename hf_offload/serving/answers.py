"""What becomes of logits: `Sampler` draws an answer's tokens, `Answer` turns them into the parts of a message."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers as hf

from hf_offload.serving.requests import Asked, RequestError

Delta = dict[str, Any]  # a part of a message, as OpenAI's streams have it: content, reasoning_content or tool_calls
THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
"""What opens and closes reasoning and tool calls: Qwen, Hermes, SmolLM3, DeepSeek-R1 and models trained like them."""
PARAMETER = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|$))"


class Sampler:
    """Draws the tokens of one answer: knobs of Transformers as there, penalties and biases as OpenAI has them.

    Args:
        asked: the request; own: the model's configuration, for what the request leaves out.
        prompt: token ids; vocabulary: how many there are. A `logit_bias` for others is refused.
    """

    def __init__(self, asked: Asked, own: hf.GenerationConfig | None, prompt: Sequence[int], vocabulary: int) -> None:
        samples = bool(own and own.do_sample)  # a model that does not sample takes the likeliest token

        def knob(name: str, default: float) -> float:
            usual = getattr(own, name, None) if samples or name == "repetition_penalty" else None
            return float(next(x for x in (getattr(asked, name), usual, default) if x is not None))

        if bad := [token for token in asked.logit_bias if int(token) >= vocabulary]:
            raise RequestError(f"logit_bias names {bad[0]}, which is no token below {vocabulary}", "logit_bias")
        self._bias = torch.zeros(vocabulary, dtype=torch.float32, device="cpu")
        for token, bias in asked.logit_bias.items():
            self._bias[int(token)] = bias
        self._ids = torch.tensor([prompt], dtype=torch.int64, device="cpu")
        self._drawn, self._presence, self._frequency = set[int](), asked.presence_penalty, asked.frequency_penalty
        self._dice = torch.Generator("cpu")
        self._dice.manual_seed(secrets.randbits(63) if asked.seed is None else asked.seed)
        self._penalty = hf.RepetitionPenaltyLogitsProcessor(knob("repetition_penalty", 1))
        temperature, top_k = knob("temperature", float(samples)), int(knob("top_k", 0))
        self._warps: list[Any] = []  # none: the likeliest token is taken
        if temperature >= 1e-4:  # logits divided by less overflow
            self._warps = [hf.TemperatureLogitsWarper(temperature)]
            self._warps += [hf.TopKLogitsWarper(top_k)] if top_k > 0 else []
            self._warps += [hf.TopPLogitsWarper(max(knob("top_p", 1), 1e-6)), hf.MinPLogitsWarper(knob("min_p", 0))]

    def draw(self, logits: torch.Tensor) -> int:
        """Return a token, by logits `[1, vocabulary]`."""
        ids: Any = self._ids
        scores: Any = self._penalty(ids, logits.to("cpu", torch.float32, copy=True)) + self._bias
        for warp in self._warps:
            scores = warp(ids, scores)
        if (weights := scores.softmax(-1)).isnan().any():
            raise RuntimeError("the model's logits are not finite; try --dtype float32, or look at its weights")
        drawn = torch.multinomial(weights, 1, generator=self._dice) if self._warps else scores.argmax(-1, True)
        self._ids, token = torch.cat((ids, drawn), 1), int(drawn)
        self._bias[token] -= self._frequency + (0 if token in self._drawn else self._presence)
        self._drawn.add(token)
        return token


class Answer:
    """The deltas of an answer.

    Args:
        tokenizer: the model's.
        stop: texts that end the answer and are not given.
        thinks: whether `<think>` opens reasoning; within: whether the prompt has opened it.
        tools: the tools that may be called, as requests name them.
    """

    def __init__(
        self, tokenizer: hf.PreTrainedTokenizerBase, *, stop: str | Sequence[str] = (), thinks: bool = False,
        within: bool = False, tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        self._tokenizer, self._tools = tokenizer, tools
        self._stop = [*filter(None, [stop] if isinstance(stop, str) else stop)]
        self._marks = [mark for mark, wanted in ((THINK, thinks), (CALL, bool(tools))) if wanted]
        self._region, self._first = THINK if within else None, within  # nothing of this part was given yet
        self._ids, self._read, self._held = list[int](), 0, ""
        self.stopped, self.calls = False, list[dict[str, Any]]()  # whether a stop sequence has come; the tool calls

    def add(self, token: int) -> list[Delta]:
        """Return what a token adds; what may be the beginning of a mark, or of a character, is held back."""
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._read]), self._decode(self._ids)
        if not now.endswith("\ufffd") or len(self._ids) > self._read + 8:  # else a character is begun
            self._ids, self._held = self._ids[-8:], self._held + now[len(before) :]
            while "\ufffd" in self._decode(self._ids):  # what is decoded together may not begin within a character
                del self._ids[0]
            self._read = len(self._ids)
        return list(self._split())

    def end(self) -> list[Delta]:
        """Return what was held back, but for a character's first bytes."""
        now = self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :].rstrip("\ufffd")
        return [] if self.stopped else list(self._give((CALL[0] if self._region is CALL else "") + self._held + now))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _split(self) -> Iterator[Delta]:
        while not self.stopped:
            stop = [] if self._region is CALL else self._stop
            marks = [*stop, *([mark for mark, _ in self._marks] if self._region is None else self._region[1:])]
            hits = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            if not hits:
                if self._region is not CALL:
                    size = len(self._held)  # up to what may be the beginning of a mark
                    cut = next((i for i in range(size) if any(x.startswith(self._held[i:]) for x in marks)), size)
                    text, self._held = self._held[:cut], self._held[cut:]
                    yield from self._give(text)
                return
            at, mark = min(hits)
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


def parse_call(text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return name and arguments (as JSON) of a tool call, JSON or Qwen3.5's tags; None if it is neither."""
    try:
        if (named := re.search(r"<function=([^>\n]+)>", text)) and not text.lstrip().startswith("{"):
            own: Any = next((tool["function"] for tool in tools if tool["function"].get("name") == named[1]), {})
            kinds = (own.get("parameters") or {}).get("properties") or {}
            parameters = re.findall(PARAMETER, text, re.DOTALL)
            call = {"name": named[1], "arguments": {k: _value(x, kinds.get(k)) for k, x in parameters}}
        else:
            call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    made: Any = {"name": name, "arguments": json.dumps(arguments)}
    return made if isinstance(name, str) and isinstance(arguments, dict) else None


def _value(text: str, schema: Any) -> Any:
    """A parameter's value by its schema: text, if that may be a string, or else JSON."""
    own = schema if isinstance(schema, dict) else {}
    types = json.dumps([each.get("type") for each in (own, *own.get("anyOf", ()), *own.get("oneOf", ()))])
    with contextlib.suppress(ValueError, RecursionError):
        if '"string"' not in types or (text == "null" and '"null"' in types):
            return json.loads(text)
    return text
