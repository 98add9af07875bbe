"""Crops after an append: they restore the state before it, or retain every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.model.hooks import hybrid_layers

BLOCK = 16
PROMPT, STEPS = 170, 10


class Talk:
    """A cache of two rows, the second of which is left padded, and what it has been told."""

    def __init__(self, model: PreTrainedModel, tier: str, policy: str = "hgca", **knobs: Any) -> None:
        own = {"window": 60, "beta": 3.0} if policy == "hgca" else {}
        self.model, self.mask = model, torch.zeros(2, 0, dtype=torch.long)
        self.cache = HybridCache(model, policy, tier=tier, block_size=BLOCK, **(own | knobs))

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
        self.say(*prompt(2, PROMPT))
        self.steps(3)
        return self

    def steps(self, seed: int, count: int = STEPS) -> torch.Tensor:
        """Decode some tokens; the logits."""
        return self.append(seed, count, 1)

    def append(self, seed: int, count: int = 40, chunk: int = 40) -> torch.Tensor:
        return torch.stack([self.say(part) for part in prompt(2, count, seed)[0].split(chunk, 1)])

    def fail(self, layer: int, error: type[BaseException], ids: torch.Tensor) -> None:
        """A forward that ends early, in a layer."""

        def fail(*_: Any) -> None:
            raise error

        hook = self.model.model.layers[layer].register_forward_pre_hook(fail)
        with pytest.raises(error):
            self.say(ids)
        hook.remove()

    def reload(self, folder: Path) -> None:
        self.cache.save(folder)
        self.cache = HybridCache.load(folder, self.model)

    def known(self) -> list[torch.Tensor]:
        """What the layers know that steps or appends use."""
        self.cache.drain()
        states = [layer.state.tensors() for layer in hybrid_layers(self.cache)]
        outside = [int(state["numbers"][1]) * BLOCK for state in states]
        found = [state["average"][:, :, stop:].clone() for state, stop in zip(states, outside, strict=True)]
        return found + [state[name].clone() for state in states for name in ("kept", "known", "queries", "numbers")]

    def keeps_all(self) -> bool:
        """Whether lists hold all tokens of blocks outside the window that are no padding."""
        self.cache.drain()
        states = [layer.state.now for layer in hybrid_layers(self.cache)]
        return all(
            state.retained.positions[i, : state.retained.counts[i]].tolist()
            == self.mask[i // 2, : state.outside].nonzero()[:, 0].tolist()
            for state in states
            for i in range(state.retained.lists)
        )


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, got, want))


SHARE = {"window": None, "gpu_ratio": 0.3}


@pytest.mark.parametrize(
    ("knobs", "tier"),
    [({}, "one"), (SHARE | {"rescue": 24}, "split"), pytest.param(SHARE, "one", marks=pytest.mark.slow)],
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
    talk.fail(0, ArithmeticError, prompt(2, 1)[0])
    assert same(talk.known(), before)
    assert torch.equal(talk.append(7), other.append(7))
    assert torch.equal(talk.steps(8, 20), other.steps(8, 20))


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("left", [0, 20, 100])  # what goes with the append: nothing, within the window, more
def test_a_crop_across_an_append_keeps_every_token(
    model: PreTrainedModel, tmp_path: Path, left: int, tier: str
) -> None:
    """Also in a fork, a file, and with other rows."""
    talk = Talk(model, tier).begin()
    length = talk.cache.get_seq_length()
    talk.append(5, chunk=13)
    talk.steps(6)
    assert not talk.keeps_all()
    if left == 0:
        talk.cache = talk.cache.fork()
    elif left == 20:
        talk.reload(tmp_path / "cache")
    talk.cache.crop(length - left - talk.cache.get_seq_length())
    assert talk.keeps_all()
    if left > STEPS:  # the prompt alone, whose keys and values are those of full attention
        other = Talk(model, tier, "full")
        ids, mask = prompt(2, PROMPT)
        first = PROMPT + STEPS - left
        other.say(ids[:, :first], mask[:, :first])
        torch.testing.assert_close(talk.steps(8), other.steps(8), rtol=1e-5, atol=1e-5)
    talk.append(9)
    assert not talk.keeps_all()  # its queries have weighed them
    talk.cache.batch_select_indices(torch.tensor([1, 0, 1]))
    talk.mask = talk.mask[[1, 0, 1]]
    talk.cache.crop(-40)
    assert talk.keeps_all()


def test_a_turn_that_begins_where_a_cropped_one_ended_is_another_one(model: PreTrainedModel) -> None:
    talk = Talk(model, "one").begin()
    talk.append(5)
    talk.cache.crop(-5)
    talk.steps(6, 5)
    talk.append(7)
    talk.steps(8, 1)
    talk.cache.crop(-43)
    assert talk.keeps_all()


def test_a_crop_within_the_steps_behind_an_append_keeps_what_was_kept(model: PreTrainedModel) -> None:
    talk = Talk(model, "one").begin()
    talk.append(5)
    states = [layer.state for layer in hybrid_layers(talk.cache)]
    talk.cache.drain()
    kept = [state.now.kept[:, :, : state.now.outside].copy() for state in states]
    talk.steps(6, 4)
    talk.cache.crop(-3)
    assert all((state.now.kept[:, :, : had.shape[2]] == had).all() for state, had in zip(states, kept, strict=True))


def test_files_hold_chunks_of_a_prompt(model: PreTrainedModel, tmp_path: Path) -> None:
    talk, other = Talk(model, "one"), Talk(model, "one")
    for i, one in enumerate((talk, other)):
        for part, real in zip(*(part.split(60, 1) for part in prompt(2, PROMPT)), strict=True):
            one.say(part, real)
            if i == 0:
                one.reload(tmp_path / "cache")
        one.steps(3)
        one.append(7)
    talk.reload(tmp_path / "cache")
    assert same(talk.known(), other.known())
    for one in (talk, other):
        one.steps(4, 1)
        one.cache.crop(-50)
        assert one.keeps_all()
    assert same(talk.known(), other.known())


@pytest.mark.parametrize("append", ["max", "mean"])
def test_a_chunk_that_fails_and_comes_again_counts_once(model: PreTrainedModel, append: str) -> None:
    talk, other = (Talk(model, "one", append=append, append_queries=20).begin() for _ in range(2))
    for part in prompt(2, 40, 5)[0].split(14, 1):
        talk.fail(2, ArithmeticError, part)
        talk.say(part)
        other.say(part)
    assert all(
        torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-7)
        for got, want in zip(talk.known(), other.known(), strict=True)
    )


def test_an_interruption_does_not_size_the_window_anew(model: PreTrainedModel) -> None:
    """A share of the tokens is taken at an append, and is constant until the next one."""
    talk = Talk(model, "one", **SHARE).begin()
    talk.steps(5, 80)
    slots = [layer.state.slots for layer in hybrid_layers(talk.cache)]
    talk.fail(2, KeyboardInterrupt, prompt(2, 1)[0])
    talk.cache.crop(0)
    talk.steps(6, 1)
    assert [layer.state.slots for layer in hybrid_layers(talk.cache)] == slots
