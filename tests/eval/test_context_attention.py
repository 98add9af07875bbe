"""The script for attention in long contexts: timed parts, counted bytes, compared rows."""

from __future__ import annotations

import csv
import time

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import AttentionInterface
from typer.testing import CliRunner

import common
import context_attention
from hf_offload.attention.hooks import find_layers
from hf_offload.cache.fingerprint import likeness
from hf_offload.policies.fluxion.predictor import HeadPredictor, save_predictors

BLOCK = {"block_size": 32}
TOKEN = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes


@torch.inference_mode()
@pytest.mark.parametrize("row", [common.FULL, common.Row("full-hybrid", "full", BLOCK)], ids=lambda row: row.name)
def test_the_watch_runs_while_attention_is_computed(row, monkeypatch):
    model, ids = tiny_model("llama"), prompt(1, 40)[0]
    cache = row.make_cache(model)
    common.prefill(model, cache, ids)
    name = model.config._attn_implementation
    attend, calls = AttentionInterface()[name], []

    def slow(*args, **kwargs):
        calls.append(1)
        time.sleep(0.02)
        return attend(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, slow)
    watch = context_attention.Watch()
    with watch.watching(name, cache):
        model(ids[:, :1], past_key_values=cache)
    assert len(calls) == 4
    assert watch.seconds > 4 * 0.02
    assert AttentionInterface()[name] is slow
    assert "update" not in vars(cache)
    before = watch.seconds
    model(ids[:, :1], past_key_values=cache)
    assert watch.seconds == before


@torch.inference_mode()
@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("window", 96), ("scout", 192)])
def test_rows_take_over_what_full_attention_has_read(policy, budget):
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    row = common.Row(f"{policy}-row", policy, BLOCK | ({} if budget is None else {"budget": budget}))
    caches = context_attention.fill(model, [row], ids[:, :-6], 294, lambda _: None)
    taken, full = caches[row.name], caches[common.FULL.name]
    row.activate(model)
    read = row.make_cache(model)
    common.prefill(model, read, ids[:, :-6])
    times, mine = context_attention.decode(model, row, taken, ids[:, -6:], 0)
    assert [len(values) for values in times.values()] == [4, 4, 4]
    assert times["retrieval"] == [0.0] * 4
    assert all(0 < part < whole for part, whole in zip(times["attention"], times["step"], strict=True))
    want = torch.cat([model(token, past_key_values=read).logits[:, -1] for token in ids[:, -6:].split(1, 1)])
    torch.testing.assert_close(mine, want.log_softmax(-1).cpu(), atol=1e-4, rtol=1e-4)
    digests = taken.stats().as_dict()["digest_bytes"]
    attended = 300 if budget is None else budget
    assert context_attention.read_bytes(model, row, taken) == (attended * TOKEN + digests, None)
    assert (digests > 0) == (policy == "scout")
    assert context_attention.read_bytes(model, common.FULL, full) == (294 * TOKEN, None)


@torch.inference_mode()
def test_a_long_context_repeats_a_short_text():
    """Each token's copies share the weight that it would have alone, so that nothing changes but the last tokens'."""
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    rows = [
        common.Row("full-row", "full", BLOCK),
        common.Row("hgca-row", "hgca", {"gpu_ratio": 0.1, "beta": 0.0} | BLOCK),
    ]
    caches = context_attention.fill(model, rows, ids[:, :-6], 1000, lambda _: None)
    assert {cache.get_seq_length() for cache in caches.values()} == {1000}
    own = context_attention.TURN
    for layer in caches["full"].layers:
        part = 300 - 6 - own
        assert torch.equal(layer.keys[:, :, part : 2 * part], layer.keys[:, :, :part])
    want = context_attention.decode(model, common.FULL, caches["full"], ids[:, -6:], 1000 - 294)[1]
    for row in rows:
        got = context_attention.decode(model, row, caches[row.name], ids[:, -6:], 1000 - 294)[1]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    # The positions are those of the short text: a cache that holds it once attends to the same keys.
    once = context_attention.fill(model, [], ids[:, :-6], 294, lambda _: None)["full"]
    torch.testing.assert_close(
        caches["full"].layers[0].keys[:, :, -6:], ids_keys(model, once, ids), atol=1e-5, rtol=1e-5
    )


def ids_keys(model, cache, ids):
    """Keys of the first layer for the last 6 tokens, behind a cache that holds the others."""
    for token in ids[:, -6:].split(1, 1):
        model(token, past_key_values=cache)
    return cache.layers[0].keys[:, :, -6:]


def test_bytes_of_a_window_and_what_is_kept():
    class Kept:
        layers = range(4)

        def get_seq_length(self):
            return 1000

        def stats(self):
            return self

        def as_dict(self):
            return {"kept_share": 0.25, "digest_bytes": 0, "retrievals": {}}

    rows = {row.name: row for row in context_attention.make_rows(None)}
    got = context_attention.read_bytes(tiny_model("llama"), rows["hgca-0.1"], Kept())
    chosen = 0.25 * (1000 - 128) * TOKEN
    assert got == (128 * TOKEN + chosen, chosen)


@torch.inference_mode()
def test_bytes_of_what_the_cpu_chose():
    model, ids = tiny_model("llama"), prompt(1, 480)[0]
    row = common.Row("fixed", "fixed_hybrid", {"budget": 0.5})
    cache = row.make_cache(model)
    common.prefill(model, cache, ids[:, :-2])
    times = context_attention.decode(model, row, cache, ids[:, -2:], 0)[0]
    assert len(times["retrieval"]) == 0  # all steps were warm-up
    times = context_attention.decode(model, row, cache, ids[:, :3], 0)[0]
    assert 0 < times["retrieval"][0] < times["attention"][0] < times["step"][0]
    cache.crop(-3)
    read, chosen = context_attention.read_bytes(model, row, cache)
    stats = cache.stats().as_dict()
    assert 0.4 < stats["retrievals"]["retrieved_share"] <= 1
    assert chosen == pytest.approx(stats["retrievals"]["retrieved_share"] * 160 * TOKEN)
    told = stats["retrievals"]
    assert told["scored_share"] == 1
    digests = chosen * told["scored_bytes"] / told["retrieved_bytes"]
    assert read == pytest.approx(320 * TOKEN + chosen + digests)
    assert digests == pytest.approx(
        160 / 16 * 4 * 2 * 2 * 16 * 4 + 160 / 16 * 4 * 4, rel=0.01
    )  # 4 layers, 2 heads of 16


def test_a_predictor_has_a_row_for_every_deviation_that_it_knows(tmp_path):
    path = tmp_path / "predictor.safetensors"
    made = {tau: HeadPredictor(tau=tau, digest="quest", sinks=16, local=32, streaming_at=0.5) for tau in (0.2, 0.05)}
    model = tiny_model("llama")
    save_predictors(path, likeness(model.config, find_layers(model)[0]), made, {})
    rows = [row for row in context_attention.make_rows("one", path) if row.policy == "fluxion"]
    assert [row.name for row in rows] == ["fluxion-0.05", "fluxion-0.2"]
    assert rows[1].options == {"predictor": path, "tau": 0.2, "tier": "one"}


def test_rows_are_compared_token_by_token():
    full = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    mine = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    kl, top = context_attention.compare(mine, full)
    want = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.3 * torch.tensor(0.3 / 0.6).log()
    assert kl == pytest.approx(float(want) / 2)
    assert top == 0.5


def test_every_row_is_measured_at_every_length(tmp_path, monkeypatch):
    ids = prompt(1, 140)[0]
    monkeypatch.setattr(context_attention, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(context_attention, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(context_attention, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    out = tmp_path / "context.csv"
    options = ["--contexts", "128,64", "--rows", "full-hybrid,window-1024", "--steps", "2", "--rounds", "3"]
    result = CliRunner().invoke(common.command(context_attention.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["context"], line["row"]) for line in lines] == [
        (context, row) for context in ("64", "128") for row in ("full", "full-hybrid", "window-1024")
    ]
    for line in lines:
        assert float(line["kl"]) == pytest.approx(0, abs=1e-5)
        assert float(line["attention"]) < float(line["step"])
    assert [line["attention_ratio"] for line in lines[::3]] == ["1", "1"]
    assert float(lines[1]["attention_ratio"]) == pytest.approx(
        float(lines[1]["attention"]) / float(lines[0]["attention"]), rel=1e-4
    )
