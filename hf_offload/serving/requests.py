"""Requests as OpenAI's API has them: what is honoured; all else is refused by name."""

from __future__ import annotations

import contextlib
import inspect
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase


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
TOOLS = 'Call these functions by <tool_call>{"name": …, "arguments": {…}}</tool_call> in your answer:\n'
"""What the system's message says where the model's template names no tools."""
Ids = Annotated[list[int], Field(fail_fast=True)]  # one error tells enough of a million


class _Part(BaseModel, extra="allow", strict=True):
    type: Literal["text"]
    text: str


class _Message(BaseModel, extra="allow", strict=True):
    role: str
    content: str | Annotated[list[_Part], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates take it: one text, objects as arguments of calls, all else as it is."""
        message, parts = self.model_dump(exclude_unset=True), self.content or ""
        message["content"] = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        message["role"] = "system" if self.role == "developer" else self.role
        for call in message.get("tool_calls") or ():
            with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return message


class _Tool(BaseModel, extra="allow", strict=True):
    type: Literal["function"]
    function: dict[str, Any]


class Asked(BaseModel, extra="forbid", strict=True):
    """What requests have in common; None asks for nothing."""

    subject: ClassVar[str]  # the parameter with the prompt
    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)  # -1: all, as in vLLM
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] = {}
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = {}
    cache_salt: str | None = None


class Prompted(Asked):
    """A request with a prompt."""

    subject = "prompt"
    prompt: str | Annotated[list[str], Field(fail_fast=True)] | Ids | Annotated[list[Ids], Field(fail_fast=True)]

    def ids(self, tokenizer: PreTrainedTokenizerBase, *, answer: bool) -> list[int]:
        """Return the prompt's ids; several prompts are refused, and what is no id."""
        prompt: Any = self.prompt[0] if len(self.prompt) == 1 and not isinstance(self.prompt[0], int) else self.prompt
        ids, size = list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else prompt, len(tokenizer)
        if not all(isinstance(token, int) and 0 <= token < size for token in ids):
            raise RequestError(f"prompt is not one text or one list of token ids below {size}; send each", "prompt")
        return ids


class Chatted(Asked):
    """A request with messages."""

    subject = "messages"
    messages: list[_Message] = Field(min_length=1, fail_fast=True)
    tools: list[_Tool] = Field([], fail_fast=True)
    tool_choice: Literal["auto", "none"] = "auto"
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [tool.model_dump() for tool in self.tools if self.tool_choice == "auto"]

    def ids(self, tokenizer: PreTrainedTokenizerBase, *, answer: bool) -> list[int]:
        """Return the ids of messages that the model's template takes; `answer`: whether one is to follow."""
        messages, tools = [each.for_template() for each in self.messages], self.offered
        if tools and "tools" not in str(tokenizer.chat_template):
            offer = TOOLS + "\n".join(json.dumps(tool["function"]) for tool in tools)
            first = messages.pop(0)["content"] + "\n\n" if messages[0]["role"] == "system" else ""
            messages = [{"role": "system", "content": first + offer}, *messages]
        given, own = self.chat_template_kwargs, inspect.signature(tokenizer.apply_chat_template).parameters
        if reserved := given.keys() & {"messages", "self", *own} - {"documents"}:
            raise RequestError(f"chat_template_kwargs.{min(reserved)} is not supported", "chat_template_kwargs")
        final, follows = self.continue_final_message, self.add_generation_prompt
        follows = answer and not final if follows is None else follows
        options: dict[str, Any] = {"preserve_thinking": True, "continue_final_message": final, "return_dict": False}
        options |= {"add_generation_prompt": follows, "tools": tools or None} | given
        try:
            ids: Any = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates raise what they like
            why = f"messages cannot be written by the model's chat template: {error}; mend them or use /v1/completions"
            raise RequestError(why, "messages") from error
        return list(ids)


def parse(body: bytes, *kinds: type[Chatted | Prompted]) -> Chatted | Prompted:
    """Return a request from its JSON, of the first kind whose subject it has; refuse what is not honoured by name."""
    try:
        given = from_json(body, allow_inf_nan=False)
        if isinstance(given, dict):  # leave out what asks for nothing; 0 is not False
            given = {k: x for k, x in given.items() if x is not None and k not in LABELS}
            given = {k: x for k, x in given.items() if repr(x) != repr(NEUTRAL.get(k))}
        fitting = (kind for kind in kinds if isinstance(given, dict) and kind.subject in given)
        return next(fitting, kinds[-1]).model_validate(given)
    except ValidationError as refused:
        error = refused.errors()[-1]
        where, name = ".".join(map(str, error["loc"])) or "the body", next(map(str, error["loc"]), None)
        value = f"={json.dumps(error['input'], default=str)[:60]}" if name and error["type"] != "missing" else ""
        code = "unsupported_parameter" if error["type"] in ("extra_forbidden", "literal_error") else None
        raise RequestError(f"{where}{value} is not supported: {error['msg']}", name, code) from refused
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
