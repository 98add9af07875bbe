"""Requests as OpenAI's API has them: what is honoured; all else is refused by name."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from transformers import GenerationConfig, PreTrainedTokenizerBase


class RequestError(ValueError):
    """A request that is refused: the parameter, OpenAI's word for the error, and the status of the response."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


LABELS = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"}
"""Parameters that change no answer."""
NEUTRAL: dict[str, Any] = {
    "best_of": 1, "cache_prompt": True, "echo": False, "logprobs": False, "modalities": ["text"], "n": 1,
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "store": False, "suffix": "", "top_logprobs": 0,
}  # fmt: skip
"""Values that ask for nothing, of parameters that are not honoured."""


class _Strict(BaseModel, extra="forbid", strict=True):
    pass


class _Part(_Strict, extra="allow"):
    type: Literal["text"]
    text: str


class _Message(_Strict, extra="allow"):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates take it: one text, objects as arguments of calls, all else as it is."""
        parts = self.content if isinstance(self.content, list) else []
        text = "\n".join(part.text for part in parts) if parts else self.content or ""
        role = "system" if self.role == "developer" else self.role
        calls = {"tool_calls": [_parsed(call) for call in self.tool_calls]} if self.tool_calls else {}
        return self.model_dump(exclude_unset=True) | {"role": role, "content": text} | calls


class _Tool(_Strict, extra="allow"):
    type: Literal["function"]
    function: dict[str, Any]


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(_Strict):
    """What requests have in common; None asks for nothing."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1: all, as in vLLM
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: dict[str, float] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        """Leave out what asks for nothing; what is left of it is refused."""
        if not isinstance(given, dict):
            return given
        some = {name: value for name, value in given.items() if value is not None and name not in LABELS}
        return {name: value for name, value in some.items() if name not in NEUTRAL or value != NEUTRAL[name]}

    def sampling(self, config: GenerationConfig | None, vocabulary: int) -> dict[str, Any]:
        """Return what `Sampler` takes, with a model's own values for what is not asked for.

        Raises:
            RequestError: `logit_bias` names what is no token.
        """
        if bad := [token for token in self.logit_bias or () if not token.isdecimal() or int(token) >= vocabulary]:
            raise RequestError(f"logit_bias names {bad[0]!r}, which is no token below {vocabulary}", "logit_bias")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        asked = {name: getattr(self, name) for name in (*names, "presence_penalty", "frequency_penalty", "seed")}
        own = {name: getattr(config, name, None) for name in (names if config and config.do_sample else names[-1:])}
        found = {k: v for given in (own, asked) for k, v in given.items() if v is not None}
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        greedy = not (config and config.do_sample)  # a model that does not sample takes the likeliest token
        return {"temperature": 0.0 if greedy else 1.0} | found | {"logit_bias": bias}


class Prompted(Asked):
    """A request with a prompt."""

    prompt: str | list[str] | list[int] | list[list[int]]

    def ids(self, tokenizer: PreTrainedTokenizerBase, *, answer: bool) -> list[int]:
        """Return the prompt's ids.

        Raises:
            RequestError: they are several prompts, or no ids.
        """
        prompt: Any = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        ids, size = list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt, len(tokenizer)
        if not all(isinstance(token, int) and 0 <= token < size for token in ids):
            raise RequestError(f"prompt is not one text or one list of token ids below {size}; send each", "prompt")
        return ids


class Chatted(Asked):
    """A request with messages."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or ()]

    def ids(self, tokenizer: PreTrainedTokenizerBase, *, answer: bool) -> list[int]:
        """Return the messages' ids by the model's template; `answer` says whether an answer is to follow.

        Raises:
            RequestError: there is no template, or it refuses them.
        """
        messages, tools = [each.for_template() for each in self.messages], self.offered
        if tools and "tools" not in str(tokenizer.chat_template):  # the template names none
            told = "You may call these functions:\n" + "\n".join(json.dumps(tool["function"]) for tool in tools)
            told += '\nTo call one, answer with <tool_call>{"name": …, "arguments": {…}}</tool_call>'
            system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
            messages = [{"role": "system", "content": system + told}, *messages[bool(system) :]]
        final, options = bool(self.continue_final_message), self.chat_template_kwargs or {}
        if reserved := options.keys() & {"chat_template", "conversation", "return_dict", "return_tensors", "tokenize"}:
            raise RequestError(f"chat_template_kwargs.{min(reserved)} is not supported", "chat_template_kwargs")
        follows = answer and not final if self.add_generation_prompt is None else self.add_generation_prompt
        options = {"preserve_thinking": True, "add_generation_prompt": follows} | options
        options |= {"tools": tools or None, "continue_final_message": final, "return_dict": False}
        try:
            return list(tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # templates raise what they like
            told = f"messages cannot be written by the model's chat template: {error}; mend them or use /v1/completions"
            raise RequestError(told, "messages") from error


_Kind = TypeVar("_Kind", bound=Asked)


def parse(kind: type[_Kind], body: bytes) -> _Kind:
    """Return a request of a kind from its JSON.

    Raises:
        RequestError: a parameter that is not known or honoured, or a value that is none.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as refused:
        error = refused.errors()[-1]
        name = str(error["loc"][0]) if error["loc"] else None
        where = ".".join(map(str, error["loc"])) or "the body"
        missing = error["type"] in ("missing", "extra_forbidden")
        value = "" if missing or not name else f"={json.dumps(error['input'], default=str)[:60]}"
        what = "is not supported; leave it out" if error["type"] == "extra_forbidden" else f"is refused: {error['msg']}"
        code = {"extra_forbidden": "unsupported_parameter", "literal_error": "unsupported_parameter"}.get(error["type"])
        raise RequestError(f"{where}{value} {what}", name, code) from refused


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    try:
        return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
    except (KeyError, TypeError, ValueError):
        return call
