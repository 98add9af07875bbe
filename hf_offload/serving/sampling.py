"""`Sampler`: draws the tokens of one answer, with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf

from hf_offload.serving.requests import Asked, RequestError

COLDEST = 1e-4
"""Below this temperature the likeliest token is taken: logits divided by less overflow."""


class Sampler:
    """Draws the tokens of one answer: knobs of Transformers as there, penalties and biases as OpenAI has them.

    Args:
        asked: the request; own: the model's configuration, for what the request leaves out.
        prompt: token ids; vocabulary: how many there are.

    Raises:
        RequestError: `logit_bias` names what is no token.
    """

    def __init__(self, asked: Asked, own: hf.GenerationConfig | None, prompt: Sequence[int], vocabulary: int) -> None:
        samples = bool(own and own.do_sample)  # a model that does not sample takes the likeliest token

        def knob(name: str, default: float) -> float:
            usual = getattr(own, name, None) if samples or name == "repetition_penalty" else None
            return next(x for x in (getattr(asked, name), usual, default) if x is not None)

        biases = {int(token): bias for token, bias in asked.logit_bias.items()}
        if max(biases, default=0) >= vocabulary:
            raise RequestError(f"logit_bias names {max(biases)}, which is no token below {vocabulary}", "logit_bias")
        self._bias = torch.zeros(vocabulary, dtype=torch.float32, device="cpu")
        self._bias[list(biases)] = torch.tensor(list(biases.values()), dtype=torch.float32, device="cpu")
        self._ids = torch.tensor([prompt], dtype=torch.int64, device="cpu")
        self._drawn, self._presence, self._frequency = set[int](), asked.presence_penalty, asked.frequency_penalty
        self._generator = torch.Generator("cpu")
        self._generator.seed() if asked.seed is None else self._generator.manual_seed(asked.seed)
        temperature, penalty = knob("temperature", float(samples)), knob("repetition_penalty", 1)
        top_k, top_p, min_p = int(knob("top_k", 0)), knob("top_p", 1), knob("min_p", 0)
        self._greedy, warps = temperature < COLDEST, temperature >= COLDEST
        steps: list[tuple[bool, Any, Any]] = [
            (penalty != 1, hf.RepetitionPenaltyLogitsProcessor, float(penalty)),
            (True, lambda bias: lambda _, scores: scores + bias, self._bias),
            (warps, hf.TemperatureLogitsWarper, float(temperature)),
            (warps and top_k > 0, hf.TopKLogitsWarper, top_k),
            (warps and top_p < 1, hf.TopPLogitsWarper, max(float(top_p), 1e-6)),
            (warps and min_p > 0, hf.MinPLogitsWarper, float(min_p)),
        ]
        self._steps = [make(value) for wanted, make, value in steps if wanted]

    def draw(self, logits: torch.Tensor) -> int:
        """Return a token, by logits `[1, vocabulary]`."""
        scores: Any = logits.to("cpu", torch.float32, copy=True)
        for step in self._steps:
            scores = step(self._ids, scores)
        weights = scores.softmax(-1)
        drawn = scores.argmax(-1, True) if self._greedy else torch.multinomial(weights, 1, generator=self._generator)
        token = int(drawn)
        self._ids = torch.cat((self._ids, drawn), 1)
        self._bias[token] -= self._frequency + (0 if token in self._drawn else self._presence)
        self._drawn.add(token)
        return token
