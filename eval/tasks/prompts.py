"""Prompts as token ids: cut in the middle, in a chat template, and parted into what is read and what is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.samples import Sample


@dataclass(frozen=True)
class Prompt:
    """A sample's prompt for a tokenizer.

    Attributes:
        ids: token ids `[1, N]` int64.
        asked: so many of the last tokens are the question, what the template puts behind it, and the answer's start.
        whole: tokens of the prompt before it was cut.
    """

    ids: torch.Tensor
    asked: int
    whole: int


@dataclass(frozen=True)
class Prompter:
    """Makes prompts that fit a model.

    Attributes:
        model, tokenizer: whose prompts they are.
        most: tokens of a prompt; None: as many positions as the model has, less the answer.
        chat: whether the tokenizer's chat template is used where a sample allows it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    most: int | None
    chat: bool

    @property
    def positions(self) -> int:
        """The longest context that the model can have, in tokens."""
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    def __call__(self, sample: Sample) -> Prompt:
        """The prompt of a sample that leaves room for its answer.

        What is too long loses its middle, as in LongBench: the first and the last half of what fits stay. A ValueError
        tells that these do not hold the question.
        """
        chat = self.chat and sample.chat and bool(self.tokenizer.chat_template)
        room = min(self.most or self.positions, self.positions - sample.new_tokens)
        room -= len(self._ids(self._frame("", sample, chat), special=not chat))
        content = self._ids(sample.prompt, special=False)
        text = sample.prompt
        if len(content) > room:
            half = max(room // 2, 1)
            text = self.tokenizer.decode(content[:half]) + self.tokenizer.decode(content[-half:])
        framed = self._frame(text, sample, chat)
        question = framed[framed.rindex(sample.question.strip()) :]
        ids = self._ids(framed, special=not chat)
        asked = min(len(self._ids(question, special=False)), len(ids) - 1)
        return Prompt(torch.tensor([ids]), asked, len(ids) + max(len(content) - room, 0))

    def _frame(self, text: str, sample: Sample, chat: bool) -> str:
        if chat:
            turns = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        return text + sample.start

    def _ids(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
