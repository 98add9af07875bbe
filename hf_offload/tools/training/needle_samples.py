"""Training texts with hidden facts and questions for them, which make retrieval heads retrieve.

Running text seldom makes a model look up one place of a long context. A predictor trained on nothing else takes the
heads that do so for streaming heads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

_TRAITS = ("green", "northern", "silent", "wooden", "second", "narrow", "bright", "hidden", "early", "copper")
_HOLDERS = ("baker", "harbour", "archive", "violin", "orchard", "bridge", "clinic", "satellite", "museum", "ferry")
_PARTS = (
    "amber", "basin", "cedar", "delta", "ember", "flint", "grove", "heron", "island", "juniper", "kettle", "lantern",
)  # fmt: skip
_FORMS = (
    (
        "The code for the {owner} is {secret}.",
        "What is the code for the {owner}?",
        "The code for the {owner} is {secret}.",
    ),
    (
        "Note: the {owner} has the key {secret}.",
        "Which key does the {owner} have?",
        "The {owner} has the key {secret}.",
    ),
    ("The {owner} is listed under {secret}.", "Where is the {owner} listed?", "It is listed under {secret}."),
    ('register["{owner}"] = "{secret}"', 'What is register["{owner}"]? Say the value only.', '"{secret}"'),
)
"""Sentence, question and answer."""
_MARK = "\x1f"  # stands for a message while a chat template is taken apart


def _secret(draw: random.Random) -> str:
    """A number, words or a code."""
    kind = draw.randrange(4)
    if kind == 0:
        return str(draw.randrange(10**4, 10**8))
    if kind == 1:
        return "-".join(draw.sample(_PARTS, 2))
    if kind == 2:
        return "".join(draw.choice("0123456789abcdef") for _ in range(12))
    return "-".join(f"{draw.randrange(16**4):04x}" for _ in range(4))


class _Fact(NamedTuple):
    """A sentence to hide, the question for it, and what answers it."""

    sentence: str
    question: str
    answer: str

    @classmethod
    def of(cls, owner: str, draw: random.Random) -> _Fact:
        """A random fact about an owner, with an answer of a word or of a sentence."""
        secret = _secret(draw)
        sentence, question, answer = draw.choice(_FORMS)
        answer = draw.choice(("{secret}", answer))
        return cls(*(form.format(owner=owner, secret=secret) for form in (sentence, question, answer)))


@dataclass(frozen=True)
class _Frame:
    """Ids around a text, a question and an answer, in the model's chat template where it has one.

    Args:
        before: the text; ask: between question and answer; after: between the answer and more text.
    """

    before: list[int]
    ask: list[int]
    after: list[int]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _frame(tokenizer: PreTrainedTokenizerBase) -> _Frame:
    ids = partial(_ids, tokenizer)
    if not tokenizer.chat_template:
        return _Frame([], ids("\n\n"), ids("\n\n"))
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": f"{_MARK}{number}{_MARK}"} for number, role in enumerate(roles)]
    parts = str(tokenizer.apply_chat_template(messages, tokenize=False)).split(_MARK)
    if len(parts) != 7:
        raise ValueError("the model's chat template does not keep messages as they are; use asked=0")
    return _Frame(*(ids(part) for part in parts[:6:2]))


def ask(
    text: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, interval: int, first: int, local: int, seed: int
) -> torch.Tensor:
    """Hide facts in a text, and end every stretch of `interval` tokens with a question for one of them.

    The answer follows. A stretch hides two facts, at least `local` tokens before its end. Its question is for one of
    all facts so far; each is asked for at most once. The text's end is cut off to keep its length.

    Args:
        text: token ids.
        tokenizer: the model's; its chat template frames questions and answers.
        interval: tokens of a stretch.
        first: where the first fact may stand.
        local: tokens before a question without facts.
        seed: of facts, places and questions.

    Returns:
        Token ids `[1, len(text)]`.

    Raises:
        ValueError: stretches too short for that, or a chat template that changes messages.
    """
    ids = partial(_ids, tokenizer)
    draw, frame, rest = random.Random(seed), _frame(tokenizer), iter(text)
    owners = _owners(draw)
    hidden: list[_Fact] = []
    made = list(frame.before)
    while len(made) < len(text):
        facts = [_Fact.of(next(owners), draw) for _ in range(2)]
        hidden += facts
        asked = hidden.pop(draw.randrange(len(hidden)))
        pieces = [ids(f"\n{fact.sentence}\n") for fact in facts]
        question = [*ids(f"\n\n{asked.question}"), *frame.ask]
        count = interval - len(made) % interval - len(question) - sum(map(len, pieces))  # tokens that are left for text
        low, high = max(first - len(made), 0), count - local
        if low > high:
            raise ValueError(
                f"interval={interval} leaves no room for facts {local} tokens before a question; "
                "raise it, or use asked=0"
            )
        stretch = list(islice(rest, count))
        for at, piece in zip(sorted((draw.randint(low, high) for _ in pieces), reverse=True), pieces, strict=True):
            stretch[at:at] = piece
        made += [*stretch, *question, *ids(asked.answer), *frame.after]
    return torch.tensor([made[: len(text)]], dtype=torch.int64, device="cpu")


def _owners(draw: random.Random) -> Iterator[str]:
    """Names, none twice until all have been."""
    every = [f"{trait} {holder}" for trait in _TRAITS for holder in _HOLDERS]
    while True:
        yield from draw.sample(every, len(every))
