"""The script that measures what Fluxion's prediction costs runs, and times every layer's."""

import csv

import pytest
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import predictor_share
from hf_offload.attention.hooks import find_layers
from hf_offload.cache.fingerprint import likeness
from hf_offload.cpu.row import Row
from hf_offload.fluxion.predictor import HeadPredictor, save_predictors


def test_shares_are_of_the_step(tmp_path, monkeypatch):
    model, ids, run = tiny_model("llama"), prompt(1, 500)[0], Row.run
    path, out = tmp_path / "predictor.safetensors", tmp_path / "share.csv"
    made = HeadPredictor(tau=0.1, digest="submean", sinks=16, local=32)
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
    layers = model.config.num_hidden_layers
    for line in lines:
        assert 0 < float(line["share"]) < float(line["attention_share"]) < 1
        spent = layers * float(line["predict"]) / 1e3
        assert spent / float(line["step"]) == pytest.approx(float(line["share"]), rel=0.5)
    assert Row.run is run
