"""Training samples: captured queries against the model's attention, and the needs of a text's steps."""

from __future__ import annotations

import pytest
import torch
from tiny import prompt, tiny_model

from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.tools.training import samples
from hf_offload.tools.training.samples import CapturedLayer, Samples, Sampling, capture, layer_samples

SMALL = Sampling(interval=96, steps=3, taus=(0.05, 0.3), sinks=16, local=32, digest="quest")


def seen(family: str, positions: list[int], length: int = 300, advance: list[int] | None = None) -> list[CapturedLayer]:
    read = [] if advance is None else advance
    return list(capture(tiny_model(family, "sdpa"), prompt(1, length)[0], positions, read.append))


@pytest.mark.parametrize("chunk", [37, 512])
@pytest.mark.parametrize(("family", "layers"), [("llama", [0, 1, 2, 3]), ("gemma3", [1, 3]), ("opt", [0, 1, 2, 3])])
def test_captured_queries_give_the_models_attention(
    family: str, layers: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softmax of what was captured against the weights of eager attention; sliding windows are left out."""
    monkeypatch.setattr(samples, "CHUNK", chunk)
    positions, read = [3, 50, 50, 99], []
    found = seen(family, positions, 100, read)
    assert [one.layer for one in found] == layers
    assert sum(read) == 100
    model = tiny_model(family, "eager")
    weights = model(prompt(1, 100)[0], output_attentions=True).attentions
    for one in found:
        key = one.key[0].repeat_interleave(one.queries.shape[1] // one.key.shape[1], 0)
        for query, position in zip(one.queries, positions, strict=True):
            scores = one.scale * (key[:, : position + 1] @ query[:, :, None])[..., 0]
            want = weights[one.layer][0, :, position, : position + 1]
            torch.testing.assert_close(scores.softmax(-1), want, atol=1e-5, rtol=1e-4)


def test_the_model_keeps_its_attention() -> None:
    model = tiny_model("llama", "sdpa")
    with pytest.raises(IndexError):
        list(capture(model, torch.tensor([[10_000]]), [0], lambda read: None))
    assert model.config._attn_implementation == "sdpa"


def test_layers_with_a_softcap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = samples._Capture([0])
    module = torch.nn.Linear(1, 1)
    module.layer_idx = 2  # type: ignore[assignment]
    q = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ValueError, match="layer 2 of Linear has softcap, which budgets do not know of"):
        taken.attend(module, q, q, q, None, softcap=30.0)


def test_steps_lie_behind_their_prompt() -> None:
    plan = SMALL.positions(300, seed=4)
    assert list(plan) == [96, 192, 288]
    for length, steps in plan.items():
        assert len(set(steps)) == 3
        assert steps == sorted(steps)
        assert all(length <= step < min(length + 96, 300) for step in steps)
    assert plan == SMALL.positions(300, seed=4)
    assert plan != SMALL.positions(300, seed=5)


@pytest.mark.parametrize(("length", "host"), [(63, (16, 16)), (64, (16, 32)), (79, (16, 32)), (300, (16, 256))])
def test_segments_are_whole_blocks(length: int, host: tuple[int, int]) -> None:
    assert SMALL.host(length) == host


@pytest.mark.parametrize("digest", ["quest", "submean"])
def test_budgets_keep_the_deviation_and_less_would_not(digest: str) -> None:
    """Attending sinks, local tokens and as much of the host as a sample says is within τ; one block less is not."""
    sampling = Sampling(interval=200, steps=3, taus=(0.05, 0.3), sinks=16, local=32, digest=digest)
    plan = sampling.positions(300, seed=0)
    ((length, steps),) = plan.items()
    layer = seen("llama", [length - 1, *steps])[1]
    samples = layer_samples(layer, plan, sampling)
    heads = layer.queries.shape[1]
    assert samples.features.shape == (3 * heads, 41)
    assert samples.anchor_budgets.shape == (3 * heads, 2, 4)
    assert samples.budgets.shape == (3 * heads, len(GRANULARITIES), 2)
    assert torch.isfinite(samples.features).all()
    key, value = (x[0].double().repeat_interleave(heads // x.shape[1], 0) for x in (layer.key, layer.value))
    needed = set()
    for row, position in enumerate(steps):
        first, stop = sampling.host(position + 1)
        scores = layer.scale * torch.einsum("htd,hd->ht", key[:, : position + 1], layer.queries[1 + row].double())
        full = torch.einsum("ht,htd->hd", scores.softmax(-1), value[:, : position + 1])
        order = scores[:, first:stop].argsort(descending=True)
        for head in range(heads):
            for t, tau in enumerate(sampling.taus):
                budget = float(samples.budgets[row * heads + head, 0, t])
                count = round(budget * (stop - first))
                needed.add(count)
                errors = []
                for less in {0, min(count, 1)}:
                    keep = torch.ones(position + 1, dtype=torch.bool)
                    keep[first + order[head, count - less :]] = False
                    out = scores[head, keep].softmax(-1) @ value[head, : position + 1][keep]
                    errors.append(float((out - full[head]).norm() / full.norm(dim=1).max()))
                assert errors[0] <= tau * (1 + 1e-4)
                assert count == 0 or errors[1] > tau * (1 - 1e-4)
    assert len(needed) > 3


def test_features_for_another_deviation_have_its_anchor_budgets() -> None:
    plan = SMALL.positions(300, seed=0)
    positions = [p for length, steps in plan.items() for p in (length - 1, *steps)]
    samples = layer_samples(seen("llama", positions)[0], plan, SMALL)
    columns = [FEATURES.index(f"anchor_budget_{size}") for size in GRANULARITIES[1:]]
    assert torch.equal(samples.features_at(0), samples.features)
    other = samples.features_at(1)
    assert torch.equal(other[:, columns], samples.anchor_budgets[:, 1])
    assert (other[:, columns] <= samples.features[:, columns]).all()  # a larger deviation needs no more
    assert not torch.equal(other, samples.features)
    both = Samples.joined([samples, samples])
    assert len(both.features) == 2 * len(samples.features)
