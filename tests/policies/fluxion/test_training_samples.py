"""Training samples: needed budgets, captured queries, and questions about hidden facts."""

from __future__ import annotations

import math
import re

import pytest
import torch
from letters import letters
from tiny import prompt, tiny_model

from hf_offload.attention.merge import merge_partials
from hf_offload.policies.fluxion.block_attention import Partial, Tokens, attend, attend_blocks, join_blocks
from hf_offload.policies.fluxion.budgets import GRANULARITIES, deviation_limit
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.tools.training import samples
from hf_offload.tools.training.labels import fit_line, needed_budgets
from hf_offload.tools.training.needle_samples import ask
from hf_offload.tools.training.samples import CapturedLayer, Sampling, capture, layer_samples

HEADS, GROUP, DIM, SCALE = 2, 2, 8, 0.5
TAUS = (0.02, 0.1, 0.4)


# --- needed budgets ---------------------------------------------------------------------------------------------------


def searched(
    query: torch.Tensor, host: Tokens, near: Partial, full: torch.Tensor, scores: torch.Tensor, row: int, head: int,
    size: int, tau: float, digest: str,
) -> float:  # fmt: skip
    """The least budget, by trying every number of blocks in the order of their scores."""
    keep = host.valid[row]
    key, value = (torch.where(keep[:, None], x[row, head // GROUP], 0).double() for x in host[:2])
    own = torch.where(keep, SCALE * key @ query[row, head].double(), -torch.inf)
    rank = own
    if size > 1:
        runs = torch.split(scores[row, head].double(), size // 16)
        rank = torch.stack([run.amax() if digest == "quest" else run.logsumexp(0) for run in runs])
    largest = float(full[row].double().norm(dim=-1).max())
    base = math.exp(float(near[1][row, head]))
    chosen: list[int] = []
    for block in [-1, *rank.argsort(descending=True, stable=True).tolist()]:
        if block >= 0:
            chosen += [t for t in range(block * size, min((block + 1) * size, len(own))) if keep[t]]
        weights = own[chosen].exp()
        out = (base * near[0][row, head].double() + weights @ value[chosen]) / (base + weights.sum())
        if float((out - full[row, head].double()).norm()) <= tau * largest:
            break
    return len(chosen) / int(keep.sum())


@pytest.mark.parametrize(("length", "digest"), [(7, "quest"), (48, "quest"), (330, "quest"), (330, "submean")])
def test_budgets_are_those_of_a_search(length: int, digest: str) -> None:
    """Of two rows; some tokens of the second do not count and hold NaN. Scores are near the truth but not it."""
    torch.manual_seed(length)
    query, host = (
        3 * torch.randn(2, HEADS * GROUP, DIM),
        Tokens(*torch.randn(2, 2, HEADS, length, DIM), torch.ones(2, length) > 0),
    )
    for x in (host.key, host.value):
        x[1, :, : length // 3] = torch.nan
    host.valid[1, : length // 3] = False
    near = attend(query, Tokens(*torch.randn(2, 2, HEADS, 40, DIM), torch.ones(2, 40) > 0), SCALE)
    blocks = attend_blocks(query, host, SCALE)
    scores = blocks[1] + 0.5 * torch.randn(blocks[1].shape)
    far, lse = join_blocks(blocks, -1)
    full = merge_partials([near, (far[:, :, 0], lse[:, :, 0])])[0]
    limit = deviation_limit(full, TAUS)
    found = needed_budgets(near, query, host, blocks, scores, full, limit, scale=SCALE, digest=digest)
    assert found.shape == (2, HEADS * GROUP, len(GRANULARITIES), len(TAUS))
    different = set()
    for row, head in [(row, head) for row in range(2) for head in range(HEADS * GROUP)]:
        for g, size in enumerate(GRANULARITIES):
            for t, tau in enumerate(TAUS):
                least = searched(query, host, near, full, scores, row, head, size, tau, digest)
                assert float(found[row, head, g, t]) == pytest.approx(least, abs=1e-6)
                different.add(least)
    assert len(different) > 1 + min(length // 16, 4)


def test_lines_through_budgets() -> None:
    """Steps 0, 4, 5, 6, 7; through the first budget, or through those that are chosen online: by hand, and exactly."""
    exact = 0.1 + 0.02 * torch.tensor(GRANULARITIES).log2()
    others = [0.4, 0.4, 0.6, 0.6]
    first, slope = fit_line(torch.stack((exact, torch.tensor([0.0, *others]))), "paper")
    torch.testing.assert_close(first, torch.tensor([0.1, 0.0]))
    torch.testing.assert_close(slope, torch.tensor([0.02, (1.6 + 2.0 + 3.6 + 4.2) / 126]))
    first, slope = fit_line(torch.stack((exact, torch.tensor([9.0, *others]))), "online")
    torch.testing.assert_close(slope, torch.tensor([0.02, 0.08]))  # Σ (step - 5.5) · budget / 5
    torch.testing.assert_close(first, torch.tensor([0.1, 0.5 - 5.5 * 0.08]))


# --- captured queries -------------------------------------------------------------------------------------------------


def seen(family: str, positions: list[int], length: int) -> list[CapturedLayer]:
    read: list[int] = []
    found = list(capture(tiny_model(family, "sdpa"), prompt(1, length)[0], positions, read.append))
    assert sum(read) == length
    return found


@pytest.mark.parametrize(
    ("family", "layers", "chunk"), [("llama", [0, 1, 2, 3], 37), ("gemma3", [1, 3], 512), ("opt", [0, 1, 2, 3], 37)]
)
def test_captured_queries_give_the_models_attention(
    family: str, layers: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax of what was captured against the weights of eager attention; sliding windows are left out."""
    monkeypatch.setattr(samples, "CHUNK", chunk)
    positions = [3, 50, 50, 99]
    found = seen(family, positions, 100)
    assert [one.layer for one in found] == layers
    weights = tiny_model(family, "eager")(prompt(1, 100)[0], output_attentions=True).attentions
    for one in found:
        key = one.key[0].repeat_interleave(one.queries.shape[1] // one.key.shape[1], 0)
        for query, position in zip(one.queries, positions, strict=True):
            scores = one.scale * (key[:, : position + 1] @ query[:, :, None])[..., 0]
            want = weights[one.layer][0, :, position, : position + 1]
            torch.testing.assert_close(scores.softmax(-1), want, atol=1e-5, rtol=1e-4)


def test_the_model_keeps_its_attention_and_a_softcap_is_refused() -> None:
    model = tiny_model("llama", "sdpa")
    with pytest.raises(IndexError):
        list(capture(model, torch.tensor([[10_000]]), [0], lambda read: None))
    assert model.config._attn_implementation == "sdpa"
    q, module = torch.zeros(1, 1, 1, 16), torch.nn.Linear(1, 1)
    module.layer_idx = 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="layer 2 of Linear has softcap, which budgets do not know of"):
        samples._Capture([0]).attend(module, q, q, q, None, softcap=30.0)


@pytest.mark.parametrize("asked", [False, True])
def test_steps_lie_behind_their_prompt(asked: bool) -> None:
    """Half of those behind a question lie in its answer."""
    sampling = Sampling(interval=400, steps=8, sinks=16, local=32)
    plan = sampling.positions(1700, seed=1, asked=asked)
    assert list(plan) == [400, 800, 1200, 1600]
    for length, steps in plan.items():
        assert steps == sorted({*steps})
        assert len(steps) == 8
        assert all(length <= step < min(length + 400, 1700) for step in steps)
        assert not asked or sum(step < length + 24 for step in steps) == 4
    assert plan == sampling.positions(1700, seed=1, asked=asked) != sampling.positions(1700, seed=2, asked=asked)
    assert sampling.positions(408, seed=1, asked=asked) == {400: list(range(400, 408))}
    assert [sampling.host(n) for n in (63, 64, 79, 300)] == [(16, 16), (16, 32), (16, 32), (16, 256)]  # whole blocks


def test_budgets_keep_the_deviation_and_less_would_not() -> None:
    """Attending sinks, local tokens and as much of the host as a sample says is within τ; one token less is not."""
    sampling = Sampling(interval=200, steps=3, taus=(0.05, 0.3), sinks=16, local=32)
    plan = sampling.positions(300, seed=0)
    ((length, steps),) = plan.items()
    layer = seen("llama", [length - 1, *steps], 300)[1]
    found, heads, needed = layer_samples(layer, plan, sampling), layer.queries.shape[1], set()
    assert found.features.isfinite().all()
    key, value = (x[0].double().repeat_interleave(heads // x.shape[1], 0) for x in (layer.key, layer.value))
    for row, position in enumerate(steps):
        first, stop = sampling.host(position + 1)
        counted = found.features[row * heads, [FEATURES.index(f"{side}_length") for side in ("host", "device")]]
        assert counted.tolist() == [stop - first, position + 1 - (stop - first)]
        scores = layer.scale * torch.einsum("htd,hd->ht", key[:, : position + 1], layer.queries[1 + row].double())
        full = torch.einsum("ht,htd->hd", scores.softmax(-1), value[:, : position + 1])
        order = scores[:, first:stop].argsort(descending=True)
        for head, (t, tau) in [(head, each) for head in range(heads) for each in enumerate(sampling.taus)]:
            count = round(float(found.budgets[row * heads + head, 0, t]) * (stop - first))
            needed.add(count)
            for less, enough in ((0, True), (1, False)) if count else ((0, True),):
                keep = torch.ones(position + 1, dtype=torch.bool)
                keep[first + order[head, count - less :]] = False
                out = scores[head, keep].softmax(-1) @ value[head, : position + 1][keep]
                assert ((out - full[head]).norm() <= tau * full.norm(dim=1).max()) == enough
    assert len(needed) > 3
    columns, other = [FEATURES.index(f"anchor_budget_{size}") for size in GRANULARITIES[1:]], found.features_at(1)
    assert torch.equal(found.features_at(0), found.features)
    assert torch.equal(other[:, columns], found.anchor_budgets[:, 1])
    assert (other[:, columns] <= found.features[:, columns]).all()  # a larger deviation needs no more
    assert not torch.equal(other, found.features)


# --- facts hidden in a text -------------------------------------------------------------------------------------------


TEMPLATES = {
    None: None,
    "marks": "BEGIN{% for m in messages %}<{{ m.role }}>{{ m.content }}<END>{% endfor %}",
    "strips": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<END>{% endfor %}",
}
KNOWN = re.compile(r'(?:[tT]he |\[")(\w+ \w+)(?: is| is listed under| has the key|"\] =) "?([^ "]+?)"?\.?$')


def asked_text(template: str | None, seed: int, interval: int = 1000) -> str:
    tokenizer = letters()
    tokenizer.chat_template = TEMPLATES[template]
    ids = ask(tokenizer("~" * 4000).input_ids, tokenizer, interval=interval, first=64, local=300, seed=seed)
    return str(tokenizer.decode(ids[0]))


@pytest.mark.parametrize("template", [None, "marks"])
def test_answers_follow_at_every_interval(template: str | None) -> None:
    frame, stop = ("\n\n", "\n\n") if template is None else ("<END><assistant>", "<END><user>")
    for seed in range(8):
        text = asked_text(template, seed)
        assert text == asked_text(template, seed) != asked_text(template, seed + 1)
        assert len(text) == 4000
        assert text.startswith("BEGIN<user>") == (template is not None)
        facts = list(re.finditer(r"~\n([^~\n]+)\n~", text))
        assert len(facts) == 8  # two in each stretch
        for fact in facts:
            assert fact.start(1) >= 64
            assert fact.end(1) <= (fact.start() // 1000 + 1) * 1000 - 300
        for end in (1000, 2000, 3000):
            asked, answer = text[:end], text[end : end + 60]
            assert asked.endswith(frame)
            question = asked.removesuffix(frame).rsplit("\n", 1)[1]
            secrets = dict(KNOWN.search(fact[1]).groups() for fact in facts if fact.end() < end)  # type: ignore[union-attr]
            (owner,) = [owner for owner in secrets if owner in question]
            assert secrets[owner] in answer.split(stop)[0]
    for given, message in (((None, 0, 420), "interval=420 leaves no room for facts"), (("strips", 0), "chat template")):
        with pytest.raises(ValueError, match=f"{message}.*use asked=0"):
            asked_text(*given)
