"""`Sampler`: draws the tokens of one answer, with a seed of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf


class Sampler:
    """Draws the tokens of one answer.

    Args:
        how: `temperature` (0: the likeliest token), `top_p`, `top_k`, `min_p`, `repetition_penalty` as in Transformers;
            `presence_penalty`, `frequency_penalty`, `logit_bias` (by token) and `seed` as OpenAI's. Missing: none.
        prompt: its tokens `[1, N]`.
    """

    def __init__(self, how: Mapping[str, Any], prompt: torch.Tensor) -> None:
        self._ids, self._drawn, self._bias = prompt, Counter[int](), how.get("logit_bias") or {}
        self._presence, self._frequency = how.get("presence_penalty", 0), how.get("frequency_penalty", 0)
        self._generator = torch.Generator(prompt.device)
        self._generator.manual_seed(how["seed"]) if "seed" in how else self._generator.seed()
        penalty = how.get("repetition_penalty", 1)
        self._penalty = None if penalty == 1 else hf.RepetitionPenaltyLogitsProcessor(float(penalty))
        self._warpers: list[Any] = [hf.TemperatureLogitsWarper(float(how["temperature"]))] if how["temperature"] else []
        if how.get("top_k", 0) > 0:
            self._warpers.append(hf.TopKLogitsWarper(how["top_k"]))
        if how.get("top_p", 1) < 1:
            self._warpers.append(hf.TopPLogitsWarper(max(float(how["top_p"]), 1e-6)))
        if how.get("min_p"):
            self._warpers.append(hf.MinPLogitsWarper(float(how["min_p"])))
        self._greedy = not how["temperature"]

    def draw(self, logits: torch.Tensor) -> int:
        """Return a token, by logits `[1, vocabulary]`."""
        scores: Any = logits.to(torch.float32, copy=True)
        if self._penalty is not None:
            scores = self._penalty(self._ids, scores)
        for token, bias in self._bias.items():
            scores[0, token] += bias
        for token, count in self._drawn.items() if self._presence or self._frequency else ():
            scores[0, token] -= self._presence + self._frequency * count
        for warper in () if self._greedy else self._warpers:
            scores = warper(self._ids, scores)
        weights = torch.softmax(scores, -1)
        drawn = scores.argmax(-1, True) if self._greedy else torch.multinomial(weights, 1, generator=self._generator)
        token = int(drawn)
        self._drawn[token] += 1
        if self._penalty is not None:
            self._ids = torch.cat((self._ids, drawn), 1)
        return token
