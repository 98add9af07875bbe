"""Requests as OpenAI's API has them: what is honoured; all else is refused by name."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
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
TOOLS = """You may call these functions:
{}
To call one, answer with <tool_call>{{"name": …, "arguments": {{…}}}}</tool_call>"""
"""What the system's message says where the model's template names no tools."""


class _Part(BaseModel, extra="allow", strict=True):
    type: Literal["text"]
    text: str


class _Message(BaseModel, extra="allow", strict=True):
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


class _Function(BaseModel, extra="allow", strict=True):
    name: str
    parameters: dict[str, Any] = {}


class _Tool(BaseModel, extra="allow", strict=True):
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel, extra="forbid", strict=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


_Token = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Texts = Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class Asked(BaseModel, extra="forbid", strict=True):
    """What requests have in common; None asks for nothing."""

    subject: ClassVar[str]  # the parameter with the prompt
    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # -1: all, as in vLLM
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: dict[_Token, Annotated[float, Field(ge=-100, le=100)]] = {}
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stop: _Texts = Field([], max_length=16)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        """Leave out what asks for nothing; what is left of it is refused."""
        if not isinstance(given, dict):
            return given
        some = {name: value for name, value in given.items() if value is not None and name not in LABELS}
        return {name: x for name, x in some.items() if repr(x) != repr(NEUTRAL.get(name))}  # 0 is not False


class Prompted(Asked):
    """A request with a prompt."""

    subject = "prompt"
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

    subject = "messages"
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools if self.tool_choice == "auto"]

    def ids(self, tokenizer: PreTrainedTokenizerBase, *, answer: bool) -> list[int]:
        """Return the messages' ids by the model's template; `answer` says whether an answer is to follow.

        Raises:
            RequestError: there is no template, or it refuses them.
        """
        messages, tools = [each.for_template() for each in self.messages], self.offered
        if tools and "tools" not in str(tokenizer.chat_template):
            told = TOOLS.format("\n".join(json.dumps(tool["function"]) for tool in tools))
            first = messages.pop(0)["content"] + "\n\n" if messages[0]["role"] == "system" else ""
            messages = [{"role": "system", "content": first + told}, *messages]
        given, own = self.chat_template_kwargs, inspect.signature(tokenizer.apply_chat_template).parameters
        if reserved := given.keys() & own.keys() - {"documents"}:
            raise RequestError(f"chat_template_kwargs.{min(reserved)} is not supported", "chat_template_kwargs")
        final, follows = self.continue_final_message, self.add_generation_prompt
        follows = answer and not final if follows is None else follows
        options: dict[str, Any] = {"preserve_thinking": True, "continue_final_message": final, "return_dict": False}
        options |= {"add_generation_prompt": follows, "tools": tools or None} | given
        try:
            ids: Any = tokenizer.apply_chat_template(messages, **options)
            return list(ids)
        except Exception as error:  # templates raise what they like
            told = f"messages cannot be written by the model's chat template: {error}; mend them or use /v1/completions"
            raise RequestError(told, "messages") from error


def parse(body: bytes, *kinds: type[Chatted | Prompted]) -> Chatted | Prompted:
    """Return a request from its JSON: of the first kind whose subject it has.

    Raises:
        RequestError: no JSON, a parameter that is not known or honoured, or a value that is none.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
        fitting = (kind for kind in kinds if isinstance(given, dict) and kind.subject in given)
        return next(fitting, kinds[-1]).model_validate(given)
    except ValidationError as refused:
        error = refused.errors()[-1]
        name, where = str(error["loc"][0]) if error["loc"] else None, ".".join(map(str, error["loc"])) or "the body"
        if error["type"] == "extra_forbidden":
            raise RequestError(f"{where} is not supported; leave it out", name, "unsupported_parameter") from refused
        value = f"={json.dumps(error['input'], default=str)[:60]}" if name and error["type"] != "missing" else ""
        code = "unsupported_parameter" if error["type"] == "literal_error" else None
        raise RequestError(f"{where}{value} is refused: {error['msg']}", name, code) from refused
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    try:
        return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
    except (KeyError, TypeError, ValueError):
        return call
