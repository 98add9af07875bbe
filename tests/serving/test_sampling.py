"""Sampling: as Transformers' `generate`, OpenAI's penalties, a seed for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import tiny_model
from transformers import GenerationConfig

from hf_offload.serving.answers import Sampler
from hf_offload.serving.requests import Prompted, RequestError


def scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3


def made(
    how: dict[str, Any], own: GenerationConfig | None = None, prompt: Sequence[int] = (1, 2, 3), vocabulary: int = 50
) -> Sampler:
    return Sampler(Prompted(prompt="x", **how), own, prompt, vocabulary)


def draws(how: dict[str, Any], count: int = 200) -> list[int]:
    sampler = made({"temperature": 1.0, "seed": 5} | how)
    return [sampler.draw(scores()) for _ in range(count)]


def test_a_seed_gives_the_same_draws_whatever_else_draws() -> None:
    first = draws({})
    torch.manual_seed(1)
    assert draws({}) == first
    assert draws({"seed": 6}) != first
    assert len(set(draws({"temperature": 0.0}))) == 1


@pytest.mark.parametrize(
    ("how", "most"), [({"top_k": 3}, 3), ({"top_p": 0.1}, 3), ({"min_p": 0.9}, 3), ({"top_p": 0}, 1)]
)
def test_few_tokens_are_drawn_from(how: dict[str, Any], most: int) -> None:
    assert 1 <= len(set(draws(how))) <= most


def test_penalties_and_biases() -> None:
    first = int(scores().argmax())
    assert draws({"temperature": 0, "logit_bias": {str(first): -100}}, 1) != [first]
    assert draws({"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0}, 9).count(first) < 9
    assert len(set(draws({"temperature": 0, "repetition_penalty": 50.0}, 2))) == 2


def test_the_models_own_defaults() -> None:
    likeliest = int(scores().argmax())
    assert {made({}, GenerationConfig()).draw(scores()) for _ in range(20)} == {likeliest}
    sampled = GenerationConfig(do_sample=True, top_k=2, temperature=9.0)
    assert {made({}, sampled).draw(scores()) for _ in range(60)} == set(scores().topk(2).indices[0].tolist())
    assert len({made({"top_k": 40}, sampled).draw(scores()) for _ in range(60)}) > 2
    assert {made({"temperature": 0}, sampled).draw(scores()) for _ in range(20)} == {likeliest}


def test_no_temperature_overflows_and_no_nan_is_an_answer() -> None:
    for temperature in (1e-30, 1e-3, 100):
        assert 0 <= draws({"temperature": temperature, "logit_bias": {"3": 100}}, 1)[0] < 50
    for temperature in (0, 1):
        with pytest.raises(RuntimeError, match="not finite"):
            made({"temperature": temperature}).draw(torch.full((1, 50), torch.nan))


def test_a_bias_of_no_token_is_refused() -> None:
    with pytest.raises(RequestError, match="no token below 50"):
        made({"logit_bias": {"50": 1}})


def test_greedy_with_a_penalty_is_that_of_generate() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8]])
    out = model.generate(ids, max_new_tokens=6, do_sample=False, repetition_penalty=1.5)
    sampler = made({"temperature": 0, "repetition_penalty": 1.5}, GenerationConfig(), ids[0].tolist(), 160)
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat((ids, torch.tensor([[sampler.draw(model(ids).logits[:, -1])]])), 1)
    assert torch.equal(ids, out)
