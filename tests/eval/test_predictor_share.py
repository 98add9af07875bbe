"""The script for the cost of Fluxion's prediction: it runs and times every layer."""

import contextlib
import csv

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import predictor_share
from hf_offload import ConstantPredictor
from hf_offload.attention.hooks import find_layers
from hf_offload.cache.fingerprint import likeness
from hf_offload.cpu.launch import LaunchSequence
from hf_offload.policies.fluxion.predictor import HeadPredictor, save_predictors


def test_shares_are_of_the_step(tmp_path, monkeypatch):
    model, ids, run = tiny_model("llama"), prompt(1, 500)[0], LaunchSequence.run
    path, out = tmp_path / "predictor.safetensors", tmp_path / "share.csv"
    made = HeadPredictor(tau=0.1, digest="submean", sinks=16, local=32, streaming_at=0.5)
    save_predictors(path, likeness(model.config, find_layers(model)[0]), {0.1: made}, {})
    monkeypatch.setattr(predictor_share, "load", lambda *_: (model, None))
    monkeypatch.setattr(predictor_share, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(predictor_share, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    options = ["--predictor", str(path), "--contexts", "300,200", "--batches", "1,2", "--steps", "2", "--out", str(out)]
    result = CliRunner().invoke(common.command(predictor_share.main), options)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["context"], line["batch"]) for line in lines] == [
        ("200", "1"),
        ("200", "2"),
        ("300", "1"),
        ("300", "2"),
    ]
    for line in lines:
        assert 0 < float(line["share"]) < float(line["attention_share"]) < 1
        assert float(line["predict"]) > 0
    assert LaunchSequence.run is run


@torch.inference_mode()
@pytest.mark.parametrize("policy", ["fluxion", "fixed_hybrid"])
def test_every_layer_is_timed_and_computes_the_same(policy):
    model, ids, logits = tiny_model("llama"), prompt(1, 402)[0], []
    knobs = {"predictor": ConstantPredictor(0.3, sinks=16, local=32)} if policy == "fluxion" else {"budget": 0.3}
    for watched in (False, True):
        stopwatch, cache = predictor_share.Stopwatch(), common.Row(policy, policy, knobs).make_cache(model)
        common.prefill(model, cache, ids[:, :400])
        with stopwatch.watching() if watched else contextlib.nullcontext():
            steps = [model(token, past_key_values=cache).logits for token in ids[:, 400:].split(1, 1)]
        logits.append(torch.cat(steps))
        predictions = 2 * model.config.num_hidden_layers if watched and policy == "fluxion" else 0
        assert len(stopwatch.seconds) == predictions
    assert torch.equal(*logits)
