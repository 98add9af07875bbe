"""Every mode of `generate()`: DynamicCache's tokens with a covering budget, defined tokens with a small one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_offload import ConstantPredictor, HybridCache

BLOCK = 16
NEW = 12
LENGTH = 60

Mode = Callable[[PreTrainedModel, Any, int], torch.Tensor]


def turn(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt with a passage that occurs twice; rows after the first are left padded."""
    ids, mask = prompt(batch, LENGTH)
    ids[:, 40:] = ids[:, 20:40]
    return ids, mask


def generate(model: PreTrainedModel, cache: Any, batch: int, **options: Any) -> Any:
    """Tokens of a first turn, greedy unless the options say otherwise; sampling is seeded."""
    ids, mask = turn(batch)
    torch.manual_seed(0)
    knobs: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask}
    inputs = {} if "inputs_embeds" in options else {"inputs": ids}
    return model.generate(**inputs, past_key_values=cache, **(knobs | options))


def mode(**options: Any) -> Mode:
    """A mode that is only options."""
    return lambda model, cache, batch: generate(model, cache, batch, **options)


def embeddings(model: PreTrainedModel, cache: Any, batch: int) -> torch.Tensor:
    return generate(model, cache, batch, inputs_embeds=model.get_input_embeddings()(turn(batch)[0]))


def assisted(model: PreTrainedModel, cache: Any, batch: int) -> torch.Tensor:
    """The assistant is nearly the model: some of its drafts are right."""
    assistant = tiny_model("llama", "sdpa")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator).to(weight.device)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return generate(model, cache, batch, assistant_model=assistant)


class Heard(BaseStreamer):
    """What a streamer gets."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.reshape(-1))

    def end(self) -> None:
        self.ended = True


def streamed(model: PreTrainedModel, cache: Any, batch: int) -> torch.Tensor:
    heard = Heard()
    tokens = generate(model, cache, batch, streamer=heard)
    assert heard.ended
    assert torch.equal(torch.cat(heard.tokens), tokens[0].cpu())
    return tokens


def stopped(model: PreTrainedModel, cache: Any, batch: int) -> torch.Tensor:
    def full(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= LENGTH + 7, device=ids.device)

    return generate(model, cache, batch, stopping_criteria=StoppingCriteriaList([full]))


def scored(model: PreTrainedModel, cache: Any, batch: int) -> torch.Tensor:
    out = generate(
        model, cache, batch, return_dict_in_generate=True, output_scores=True, output_logits=True, num_beams=2
    )
    assert out.past_key_values is cache
    assert len(out.scores) == len(out.logits) == NEW
    assert torch.isfinite(torch.cat(out.logits)).all()
    return out.sequences


def _later(kind: str) -> Mode:
    def turns(model: PreTrainedModel, cache: Any, batch: int) -> torch.Tensor:
        """Three turns on one cache."""
        ids, mask = turn(batch)
        said = generate(model, cache, batch, max_new_tokens=6)
        for number in range(2):
            more, seen = prompt(batch, 9, seed=number + 5)
            if kind != "padded":
                more, seen = more.clamp(min=3), torch.ones_like(seen)
            ids = torch.cat([said, more], 1)
            mask = torch.cat([mask, mask.new_ones(batch, 6), seen], 1)
            past = cache.get_seq_length()
            fed = ids[:, past:] if kind == "new" else ids
            if kind == "chunked" and version.parse(transformers.__version__) < version.parse("5.18"):
                pytest.skip(
                    "generate() feeds cached tokens again when a later turn comes in chunks, whatever the cache"
                )
            chunks = {"prefill_chunk_size": 4} if kind == "chunked" else {}
            out = model.generate(
                fed, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False, **chunks
            )
            said = torch.cat([ids[:, : ids.shape[1] - fed.shape[1]], out], 1)
            assert cache.get_seq_length() == said.shape[1] - 1
        return said

    return turns


ONE_ROW = ("prompt lookup", "assistant", "early exit", "streamer")
"""Modes for one row."""

DRAFTED = ("prompt lookup", "assistant", "early exit")

MODES: dict[str, Mode] = {
    "greedy": mode(),
    "sampling": mode(do_sample=True, temperature=0.7),
    "beams": mode(num_beams=3),
    "beams kept": mode(num_beams=3, num_return_sequences=2),
    "beam sampling": mode(num_beams=3, do_sample=True),
    "sequences": mode(do_sample=True, num_return_sequences=2),
    "chunked prefill": mode(prefill_chunk_size=19),
    "embeddings": embeddings,
    "guidance": mode(guidance_scale=1.5),
    "prompt lookup": mode(prompt_lookup_num_tokens=3),
    "assistant": assisted,
    "early exit": mode(assistant_early_exit=2),
    "streamer": streamed,
    "stopping": stopped,
    "scores": scored,
    "turns, all ids": _later("all"),
    "turns, new ids": _later("new"),
    "turns, chunked": _later("chunked"),
    "turns, padded": _later("padded"),
}

TIERS: dict[str, dict[str, Any]] = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 6 * BLOCK}}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "window": ("window", {"budget": 512, "sinks": 16}),
    "scout": ("scout", {"budget": 512, "sinks": 16, "recent": 16, "lookahead": "off"}),
    "scout, select": (
        "scout",
        {"budget": 512, "sinks": 16, "recent": 0, "lookahead": "select", "synchronous_layers": (0,)},
    ),
    "fixed_hybrid": ("fixed_hybrid", {"budget": 1.0, "sinks": BLOCK, "local": BLOCK, "resident": None}),
    "fluxion": ("fluxion", {"predictor": ConstantPredictor(sinks=16, local=16), "resident": None}),
    "hgca": ("hgca", {"window": BLOCK, "beta": 0.0, "resident": None}),
}
# The digests of two of them are scored by the same arithmetic in both tiers; in the others the CPU rounds the query.
SCOUT: dict[str, Any] = {"budget": 48, "sinks": 8, "recent": 0, "synchronous_layers": (0,), "dense": False}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("window", {"budget": 48, "sinks": 8}),
    "scout": ("scout", SCOUT | {"recent": 8, "lookahead": "off", "digest": "quest", "attend_resident": "selected"}),
    "select": ("scout", SCOUT | {"lookahead": "select", "digest": "mean", "attend_resident": "selected"}),
    "attend": ("scout", SCOUT | {"lookahead": "attend"}),
    "h2o": ("h2o", {"heavy": 0.2, "recent": 0.2, "resident": None}),
    "infinigen": ("infinigen", {"alpha": 1.0, "resident": None}),
    "quest": ("quest", {"budget": 48, "sinks": 8, "dense": False}),
    "fixed_hybrid": ("fixed_hybrid", {"budget": 0.3, "sinks": 8, "local": 16, "resident": None, "dense": False}),
    "hgca": ("hgca", {"window": 16, "rescue": 0, "resident": None}),
}

MATRIX = [
    (mode, policy, tier, batch)
    for mode in MODES
    for policy in POLICIES
    for tier in (("split",) if policy == "scout, select" else TIERS)
    for batch in (1, 3)
    if batch == 1 or mode not in ONE_ROW
]


@pytest.fixture(scope="module")
def ours() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def wanted() -> dict[Any, torch.Tensor]:
    """Tokens of stock caches, by mode and rows."""
    return {}


def few(rows: list[Any], each: int) -> list[Any]:
    """Of every mode `each` rows, further and further apart, so that all that is varied meets all modes in turn."""
    kept = []
    for number, mode in enumerate(MODES):
        mine = [row for row in rows if row[0] == mode]
        kept += [mine[(5 * number + i * (len(mine) // each + 1)) % len(mine)] for i in range(each if mine else 0)]
    return kept


WITH_KEPT = ("beams kept", "assistant", "turns, padded", "chunked prefill")
"""Modes that policies which keep single tokens meet in any case."""


def marked(rows: list[Any], each: int) -> list[Any]:
    """All rows, those that are not among the few marked slow."""
    quick = few(rows, each) + few([row for row in rows if row[1] == "hgca" and row[0] in WITH_KEPT], each)
    return [row if row in quick else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mode", "policy", "tier", "batch"), marked(MATRIX, 1))
def test_a_covering_budget_gives_the_tokens_of_dynamic_cache(
    ours: PreTrainedModel, stock: PreTrainedModel, wanted: dict[Any, torch.Tensor],
    mode: str, policy: str, tier: str, batch: int,
) -> None:  # fmt: skip
    # What comes in one piece is right in all versions.
    oracle = "turns, all ids" if mode == "turns, chunked" else mode
    if (oracle, batch) not in wanted:
        wanted[oracle, batch] = MODES[oracle](stock, DynamicCache(config=stock.config), batch)
    name, knobs = POLICIES[policy]
    cache = HybridCache(ours, name, block_size=BLOCK, prefill_tile=32, **(TIERS[tier] | knobs))
    assert torch.equal(MODES[mode](ours, cache, batch), wanted[oracle, batch])


SMALL_MATRIX = [(mode, policy, batch) for mode in MODES for policy in SMALL for batch in (1, 3)]
SMALL_MATRIX = [row for row in SMALL_MATRIX if row[2] == 1 or row[0] not in ONE_ROW]
SAME = {
    **dict.fromkeys(DRAFTED, "greedy"),
    "streamer": "greedy",
    "embeddings": "greedy",
    "turns, new ids": "turns, all ids",
}
"""Modes that differ in how tokens are asked for, not in which come."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mode", "policy", "batch"), marked(SMALL_MATRIX, 1))
def test_a_small_budget_gives_what_the_policy_defines(
    ours: PreTrainedModel, mode: str, policy: str, batch: int
) -> None:
    name, knobs = SMALL[policy]

    def run(which: str, tier: str, **memory: Any) -> torch.Tensor:
        cache = HybridCache(ours, name, block_size=8, **(TIERS[tier] | knobs | memory))
        return MODES[which](ours, cache, batch)

    tokens = run(mode, "split")
    turns = 2 * 9 + 3 * 6 if mode.startswith("turns") else 7 if mode == "stopping" else NEW
    kept = {"beams kept": 2, "sequences": 2}.get(mode, 1)
    assert tokens.shape == (batch * kept, turns + (0 if mode == "embeddings" else LENGTH))
    assert ((tokens >= 0) & (tokens < 160)).all()
    if mode in SAME:
        assert torch.equal(tokens, run(SAME[mode], "split")[:, -tokens.shape[1] :])
    elif policy == "select":  # every block meets the real query, wherever it lies
        assert torch.equal(tokens, run(mode, "split", resident=512))
    elif policy != "attend":
        assert torch.equal(tokens, run(mode, "one"))
