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
from hf_offload import ConstantPredictor, HybridCache
from inside import Watch, digest_bytes, stored_tokens

BLOCK = {"block_size": 32}
TOKEN = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes


@torch.inference_mode()
@pytest.mark.parametrize("row", [common.FULL, common.Row("full", "full", BLOCK)], ids=lambda row: row.name)
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
    watch = Watch()
    with watch.watching(name, cache):
        model(ids[:, :1], past_key_values=cache)
    assert len(calls) == 4
    assert watch.seconds["attention"] > 4 * 0.02
    assert (watch.seconds["kernels"] > 0) == (row.name == "full")
    assert AttentionInterface()[name] is slow
    assert "update" not in vars(cache)
    before = dict(watch.seconds)
    model(ids[:, :1], past_key_values=cache)
    assert watch.seconds == before


@torch.inference_mode()
@pytest.mark.parametrize(("policy", "budget"), [("full", None), ("window", 96), ("scout", 192)])
def test_rows_take_over_what_full_attention_has_read(policy, budget):
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    row = common.Row(f"{policy}-row", policy, BLOCK | ({} if budget is None else {"budget": budget}))
    context = context_attention.Context(model, ids, [294], 294)
    taken, full = context.make_cache(row), context.make_cache(common.FULL)
    row.activate(model)
    read = row.make_cache(model)
    common.prefill(model, read, ids[:, :-6])
    times, mine = context.decode(row, taken, 0, 6)
    assert [len(values) for values in times.values()] == [4] * 5
    assert times["retrieval"] == times["predict"] == [0.0] * 4
    every = zip(times["kernels"], times["attention"], times["step"], strict=True)
    assert all(0 < kernels < part < whole for kernels, part, whole in every)
    want = torch.cat([model(token, past_key_values=read).logits[:, -1] for token in ids[:, -6:].split(1, 1)])
    torch.testing.assert_close(mine[:, 0], want.log_softmax(-1).cpu(), atol=1e-4, rtol=1e-4)
    digests = digest_bytes(taken)
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
    context = context_attention.Context(model, ids, [1000], 294)
    full = context.make_cache(common.FULL)
    part = 294 - context_attention.TAIL
    for layer in full.layers:
        assert torch.equal(layer.keys[:, :, part : 2 * part], layer.keys[:, :, :part])
    want = context.decode(common.FULL, full, 0, 6)[1]
    for row in rows:
        cache = context.make_cache(row)
        assert cache.get_seq_length() == 1000
        got = context.decode(row, cache, 0, 6)[1]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    # The positions are those of the short text: a cache that holds it once attends to the same keys.
    once = context_attention.Context(model, ids, [294], 294).make_cache(common.FULL)
    torch.testing.assert_close(full.layers[0].keys[:, :, -6:], ids_keys(model, once, ids), atol=1e-5, rtol=1e-5)


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
            return {"kept_share": 0.25, "attended_tokens": None, "retrievals": {}}

    got = context_attention.read_bytes(tiny_model("llama"), common.row_of("hgca-0.1"), Kept())
    chosen = 0.25 * (1000 - 128) * TOKEN
    assert got == (128 * TOKEN + chosen, chosen)


@torch.inference_mode()
def test_bytes_of_what_the_cpu_chose():
    model, ids = tiny_model("llama"), prompt(1, 480)[0]
    row = common.Row("fixed", "fixed_hybrid", {"budget": 0.5})
    context = context_attention.Context(model, ids, [477], 477)
    cache = context.make_cache(row)
    times = context.decode(row, cache, 0, 3)[0]
    assert 0 < times["retrieval"][0] < times["kernels"][0] < times["attention"][0] < times["step"][0]
    assert times["predict"][0] == 0 or row.policy == "fixed_hybrid"
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


@torch.inference_mode()
def test_fluxions_prediction_is_timed():
    model, ids = tiny_model("llama"), prompt(1, 480)[0]
    row = common.Row("fluxion", "fluxion", {"predictor": ConstantPredictor(0.3, sinks=16, local=32), "tier": "one"})
    context = context_attention.Context(model, ids, [400], 400)
    lines = context_attention.measure(context, [row], 2, 3)
    assert 0 < lines[1]["predict"] < lines[1]["retrieval"] < lines[1]["kernels"] < lines[1]["attention"]
    assert 0 < lines[1]["predict_share"] < 1
    assert "outside" not in lines[1]


@torch.inference_mode()
def test_a_batch_of_mixed_lengths_is_its_rows():
    model, ids = tiny_model("llama"), prompt(1, 480)[0]
    exact = common.Row("exact", "fluxion", {"predictor": ConstantPredictor(sinks=16, local=32)})
    context = context_attention.Context(model, ids, [400, 190, 330], 480)
    lines = context_attention.measure(context, [exact], 2, 3)
    assert [(line["row"], line["context"]) for line in lines] == [(n, "400+190+330") for n in ("dynamic", "exact")]
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-5)
    got = context.decode(common.FULL, context.make_cache(common.FULL), 0, 3)[1]
    for row, length in enumerate(context.lengths):
        alone = common.FULL.make_cache(model)
        common.prefill(model, alone, ids[:, :length])
        want = [model(ids[:, length + t : length + t + 1], past_key_values=alone).logits[0, -1] for t in range(3)]
        torch.testing.assert_close(got[:, row], torch.stack(want).log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert min(context.lengths) > context_attention.TAIL


@torch.inference_mode()
def test_a_bare_model_tells_what_is_outside_the_kernels():
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    twin, cache = context_attention.bare_copy(model), context_attention.BareCache(250)
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    times, logits = common.decode(twin, cache, ids[:, 250:253])
    assert (len(times), cache.get_seq_length()) == (3, 250)
    assert torch.isfinite(logits).all()
    rows = [context_attention.BARE, common.row_of("full", "one")]
    lines = context_attention.measure(context_attention.Context(model, ids, [250], 250), rows, 2, 3)
    assert [line["row"] for line in lines] == ["dynamic", "full"]
    assert isinstance(lines[1]["outside"], float)


def test_rows_are_compared_token_by_token():
    full = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    mine = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    kl, top = context_attention.compare(mine, full)
    want = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.3 * torch.tensor(0.3 / 0.6).log()
    assert kl == pytest.approx(float(want) / 2)
    assert top == 0.5


def test_every_row_is_measured_at_every_length(tmp_path, monkeypatch):
    ids = prompt(1, 140)[0]
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    out = tmp_path / "context.csv"
    options = ["--contexts", "128,64", "--rows", "full,window-1024", "--steps", "2", "--rounds", "3"]
    result = CliRunner().invoke(common.command(context_attention.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["context"], line["row"]) for line in lines] == [
        (context, row) for context in ("64", "128") for row in ("dynamic", "full", "window-1024")
    ]
    for line in lines:
        assert float(line["kl"]) == pytest.approx(0, abs=1e-5)
        assert float(line["attention"]) < float(line["step"])
    assert [line["attention_ratio"] for line in lines[::3]] == ["1", "1"]
    assert float(lines[1]["attention_ratio"]) == pytest.approx(
        float(lines[1]["attention"]) / float(lines[0]["attention"]), rel=1e-4
    )


def test_older_blocks_that_are_packed_count_with_their_bytes():
    model, ids = tiny_model("llama"), prompt(1, 600)[0]
    packed = 128 + (512 - 128) * 1152 / 4096  # bytes of a record of 32 tokens, packed and in float32
    for host_dtype, want in ((None, 512), ("int8", packed)):
        cache = HybridCache(model, "scout", host_dtype=host_dtype, tier="one")
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        assert stored_tokens(cache, 512) == want
