"""Crops after an append: they restore the state before it, or retain every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.model.hooks import hybrid_layers

BLOCK = 16
PROMPT, STEPS = 170, 10


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


class Talk:
    """A cache of two rows, the second of which is left padded, and what it has been told."""

    def __init__(self, model: PreTrainedModel, tier: str, **knobs: Any) -> None:
        self.model = model
        self.cache = HybridCache(
            model, "hgca", **({"tier": tier, "window": 60, "block_size": BLOCK, "beta": 3.0} | knobs)
        )
        self.mask = torch.zeros(2, 0, dtype=torch.long)

    @torch.no_grad()
    def say(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Take tokens in, at once; the last logits."""
        past = self.cache.get_seq_length()
        new = torch.ones_like(ids) if mask is None else mask
        mask = torch.cat([self.mask[:, :past], new], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
        logits = self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache).logits
        self.mask = mask
        return logits[:, -1]

    def begin(self) -> Talk:
        """A prompt and some steps."""
        ids, mask = prompt(2, PROMPT)
        self.say(ids, mask)
        self.steps(3)
        return self

    def steps(self, seed: int, count: int = STEPS) -> torch.Tensor:
        """Decode some tokens; the logits."""
        return torch.stack([self.say(token) for token in prompt(2, count, seed)[0].split(1, 1)])

    def append(self, seed: int, count: int = 40, chunk: int = 40) -> torch.Tensor:
        return torch.stack([self.say(part) for part in prompt(2, count, seed)[0].split(chunk, 1)])

    def reload(self, folder: Path) -> None:
        self.cache.save(folder)
        self.cache = HybridCache.load(folder, self.model)

    def known(self) -> list[tuple[Any, ...]]:
        """What each layer knows that steps or appends use, or statistics tell."""
        self.cache.drain()
        found = []
        for layer in hybrid_layers(self.cache):
            layer.unplace()
            mass = layer.state
            border, lists = mass.now.evicted * BLOCK, mass.now.retained
            held = [lists.positions[i, :n] for i, n in enumerate(lists.counts)]
            average, kept = mass.now.average[:, :, border : layer.past], mass.now.kept[:, :, : layer.past]
            weighing = mass.now.progress
            how_far = (weighing.border, weighing.prompt, weighing.end, weighing.queries.tolist())
            numbers = (mass.now.window_blocks, mass.now.evicted, mass.now.weighed.tolist(), how_far)
            found.append((numbers, average.copy(), kept.copy(), *held))
        return found


def same(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> bool:
    return all(
        len(mine) == len(theirs) and mine[0] == theirs[0] and all(map(np.array_equal, mine[1:], theirs[1:]))
        for mine, theirs in zip(got, want, strict=True)
    )


SHARE = {"window": None, "gpu_ratio": 0.3}


@pytest.mark.parametrize(
    ("knobs", "tier"),
    [({}, "one"), (SHARE, "split"), pytest.param(SHARE, "one", marks=pytest.mark.slow)],
    ids=str,
)
def test_an_append_that_is_taken_back_at_once_leaves_nothing(
    model: PreTrainedModel, knobs: dict[str, Any], tier: str
) -> None:
    talk, other = Talk(model, tier, **knobs).begin(), Talk(model, tier, **knobs).begin()
    before = talk.known()
    for seed in (5, 6):  # the same place again
        talk.append(seed)
        assert not same(talk.known(), before)
        talk.cache.crop(-40)
        assert same(talk.known(), before)
    assert torch.equal(talk.append(7), other.append(7))
    assert torch.equal(talk.steps(8), other.steps(8))
    assert same(talk.known(), other.known())


def every_token(talk: Talk) -> bool:
    """Whether lists hold all valid tokens before the window, and nobody claims to know their weights."""
    talk.cache.drain()
    return all(
        np.array_equal(
            layer.state.now.retained.positions[index, : layer.state.now.retained.counts[index]],
            np.flatnonzero(talk.mask[index // 2, : layer.state.now.evicted * BLOCK]),
        )
        and not layer.state.now.weighed.any()
        for layer in hybrid_layers(talk.cache)
        for index in range(layer.state.now.retained.lists)
    )


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("left", [0, 20, 100])  # what goes with the append: nothing, within the window, more
def test_a_crop_across_an_append_keeps_every_token(model: PreTrainedModel, left: int, tier: str) -> None:
    talk = Talk(model, tier).begin()
    length = talk.cache.get_seq_length()
    talk.append(5, chunk=13)
    talk.steps(6)
    assert not every_token(talk)
    talk.cache.crop(length - left - talk.cache.get_seq_length())
    assert every_token(talk)
    if left > STEPS:  # the prompt alone, whose keys and values are those of full attention
        other = Talk(model, tier)
        other.cache = HybridCache(model, "full", tier=tier)
        ids, mask = prompt(2, PROMPT)
        first = PROMPT + STEPS - left
        other.say(ids[:, :first], mask[:, :first])
        torch.testing.assert_close(talk.steps(8), other.steps(8), rtol=1e-5, atol=1e-5)
    talk.append(9)
    assert not every_token(talk)  # its queries have weighed them


def test_a_crop_within_the_steps_behind_an_append_keeps_what_was_kept(model: PreTrainedModel) -> None:
    talk = Talk(model, "one").begin()
    talk.append(5)
    known = talk.known()
    talk.steps(6, count=4)
    talk.cache.crop(-3)
    for mine, before in zip(talk.known(), known, strict=True):
        border = before[0][1] * BLOCK
        assert np.array_equal(mine[2][:, :, :border], before[2][:, :, :border])


def test_files_hold_chunks_of_a_prompt(model: PreTrainedModel, tmp_path: Path) -> None:
    ids, mask = prompt(2, PROMPT)
    talk, other = Talk(model, "one"), Talk(model, "one")
    for one in (talk, other):
        for part, real in zip(ids.split(60, 1), mask.split(60, 1), strict=True):
            one.say(part, real)
    talk.reload(tmp_path / "cache")
    assert same(talk.known(), other.known())
    for one in (talk, other):
        one.steps(3)
        one.append(7)
    talk.reload(tmp_path / "cache")
    assert same(talk.known(), other.known())
    for one in (talk, other):
        one.steps(4, count=1)
        one.cache.crop(-50)
        assert every_token(one)
    assert same(talk.known(), other.known())


def fails(talk: Talk, layer: int, error: type[BaseException], *given: Any) -> None:
    """A forward that ends early."""

    def fail(*_: Any) -> None:
        raise error

    hook = talk.model.model.layers[layer].register_forward_pre_hook(fail)
    with pytest.raises(error):
        talk.say(*given)
    hook.remove()


@pytest.mark.parametrize("append", ["max", "mean"])
def test_a_chunk_that_fails_and_comes_again_counts_once(model: PreTrainedModel, append: str) -> None:
    talk, other = (Talk(model, "one", append=append, append_queries=20).begin() for _ in range(2))
    for part in prompt(2, 40, 5)[0].split(14, 1):
        fails(talk, 2, ArithmeticError, part)
        talk.say(part)
        other.say(part)
    for mine, theirs in zip(talk.known(), other.known(), strict=True):
        assert mine[0] == theirs[0]
        for got, want in zip(mine[1:], theirs[1:], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_a_step_that_fails_does_not_keep_an_append_from_being_taken_back(model: PreTrainedModel) -> None:
    talk, other = Talk(model, "one").begin(), Talk(model, "one").begin()
    talk.append(5)
    fails(talk, 0, ArithmeticError, prompt(2, 1)[0])
    talk.cache.crop(-40)
    assert torch.equal(talk.steps(8), other.steps(8))
    assert same(talk.known(), other.known())


@pytest.mark.parametrize("way", ["fork", "rows", "file"])
def test_behind_forks_rows_and_files_a_crop_across_an_append_keeps_every_token(
    model: PreTrainedModel, tmp_path: Path, way: str
) -> None:
    talk = Talk(model, "split").begin()
    talk.append(5)
    if way == "fork":
        talk.cache = talk.cache.fork()
    elif way == "file":
        talk.reload(tmp_path / "cache")
    else:
        talk.cache.batch_select_indices(torch.tensor([1, 0, 1]))
        talk.mask = talk.mask[[1, 0, 1]]
    talk.cache.crop(-40)
    assert every_token(talk)


def test_an_interruption_does_not_size_the_window_anew(model: PreTrainedModel) -> None:
    """A share of the tokens is taken at an append, and is constant until the next one."""
    talk = Talk(model, "one", **SHARE).begin()
    talk.steps(5, 80)
    window = [layer.state.now.window_blocks for layer in hybrid_layers(talk.cache)]
    fails(talk, 2, KeyboardInterrupt, prompt(2, 1)[0])
    talk.cache.crop(0)
    talk.steps(6, 1)
    assert [layer.state.now.window_blocks for layer in hybrid_layers(talk.cache)] == window
