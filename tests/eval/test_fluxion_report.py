"""Fluxion's report: batches of mixed lengths, budgets by attention weight, recorded needs, the script."""

from __future__ import annotations

import csv

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import fluxion_report
from fluxion_rows import TAIL, Batch, Needing, Replayed, budgets_by_weight, recording
from hf_offload import ConstantPredictor
from hf_offload.cache.fingerprint import likeness
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, save_predictors

NEAR = {"sinks": 16, "local": 32}


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def text(llama):
    ids = prompt(1, 480)[0]
    full = common.FULL.make_cache(llama)
    with torch.inference_mode():
        common.prefill(llama, full, ids[:, :400])
    return full, ids


@torch.inference_mode()
def test_a_batch_of_mixed_lengths_is_its_rows(llama, text):
    full, ids = text
    exact = common.Row("exact", "fluxion", {"predictor": ConstantPredictor(**NEAR)})
    batch = Batch(llama, full, ids, [400, 90, 230])
    lines = batch.compared([common.FULL, exact], {r.name: batch.make_cache(r) for r in (common.FULL, exact)}, 2, 3)
    assert [line["row"] for line in lines] == ["full", "exact"]
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-5)
    assert lines[1]["batch"] == 3
    cache = batch.make_cache(common.FULL)
    got = batch.decode(common.FULL, cache, 0, 3)[1].view(3, 3, -1)
    for row, length in enumerate(batch.lengths):
        alone = common.FULL.make_cache(llama)
        common.prefill(llama, alone, ids[:, :length])
        want = [llama(ids[:, length + t : length + t + 1], past_key_values=alone).logits[0, -1] for t in range(3)]
        torch.testing.assert_close(got[:, row], torch.stack(want).log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert min(batch.lengths) > TAIL


def test_budgets_by_weight():
    torch.manual_seed(0)
    lse, scores = torch.randn(1, 2, 9) * 2, torch.randn(1, 2, 9)
    kept = torch.zeros(1, 2, 4), torch.tensor([[1.0, 20.0]])
    found = budgets_by_weight(kept, (torch.zeros(1, 2, 9, 4), lse), scores, "quest", 0.9)
    assert found[0, 1].tolist() == [0, 0, 0, 0]  # what is kept is enough
    weights, total = lse[0, 0].exp(), lse[0, 0].exp().sum() + kept[1][0, 0].exp()
    for place, run in enumerate((1, 2, 4, 8)):
        runs = [list(range(first, min(first + run, 9))) for first in range(0, 9, run)]
        runs.sort(key=lambda blocks: -max(float(scores[0, 0, b]) for b in blocks))
        mass, taken = float(kept[1][0, 0].exp()), 0
        while mass < 0.9 * total:
            mass, taken = mass + float(weights[runs[taken]].sum()), taken + 1
        assert found[0, 0, place] == pytest.approx(min(taken * run / 9, 1.0))


@torch.inference_mode()
def test_needs_are_told_again(llama, text):
    full, ids = text
    batch = Batch(llama, full, ids, [400])
    constant = ConstantPredictor(**NEAR, digest="quest")
    needing = common.Row("needing", Needing(constant, tau=0.1, criterion="output-0.1"))
    with recording() as needs:
        cache = batch.make_cache(needing)
        want = batch.decode(needing, cache, 0, 4)[1]
    assert [len(told) for told in needs.values()] == [4] * 4
    told = cache.stats().as_dict()["retrievals"]
    assert 0 < told["head_budget"] < 1
    replayed = common.Row("replayed", Replayed(constant, needs=needs))
    got = batch.make_cache(replayed)
    assert torch.equal(batch.decode(replayed, got, 0, 4)[1], want)
    assert got.stats().as_dict()["retrievals"]["head_budget"] == told["head_budget"]
    strict = common.Row("strict", Needing(constant, criterion="output-0.001"))
    exact = batch.make_cache(strict)
    batch.decode(strict, exact, 0, 4)
    assert exact.stats().as_dict()["retrievals"]["head_budget"] > told["head_budget"]


def test_time_that_is_covered():
    assert fluxion_report.busy([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]) == 5.0
    assert fluxion_report.busy([]) == 0


@pytest.mark.slow
def test_every_section_and_a_run_that_was_stopped(llama, tmp_path, monkeypatch):
    torch.manual_seed(0)
    predictors = {}
    for tau in (0.1, 0.2):
        predictors[tau] = HeadPredictor(tau=tau, digest="quest", streaming_at=0.5, **NEAR)
        predictors[tau].standardise(torch.randn(64, len(FEATURES)) * 20)
    path, out = tmp_path / "predictor.safetensors", tmp_path / "report.csv"
    save_predictors(path, likeness(llama.config, llama.model), predictors, {})
    ids = prompt(1, 480)[0]
    monkeypatch.setattr(fluxion_report, "load", lambda *_: (llama, None))
    monkeypatch.setattr(fluxion_report, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(fluxion_report, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    options = ["--predictor", str(path), "--contexts", "400", "--steps", "2", "--rounds", "1", "--out", str(out)]

    def stop(report):
        raise KeyboardInterrupt

    app = common.command(fluxion_report.main)
    with monkeypatch.context() as patch:
        patch.setitem(fluxion_report.SECTIONS, "tau", stop)
        assert CliRunner().invoke(app, options).exit_code == 130
    patched = {name: stop for name in fluxion_report.SECTIONS if name not in ("tau", "mixed")}
    with monkeypatch.context() as patch:
        for name, work in patched.items():
            patch.setitem(fluxion_report.SECTIONS, name, work)  # done before: nobody asks again
        result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    rows = {}
    for line in lines:
        rows.setdefault(line["section"], []).append(line)
    assert {name: len(found) for name, found in rows.items()} == {
        "idle": 6, "criteria": 3, "granularity": 5, "schedules": 4, "predictor": 2, "tau": 3, "mixed": 4,
    }  # fmt: skip
    assert all(float(line["step"]) > float(line["attention"]) > 0 for line in lines)
    assert [line["lengths"] for line in rows["mixed"]] == ["400+50"] * 2 + ["400+400"] * 2
    assert {line["row"]: line["device_tasks"] for line in rows["schedules"]}["none"] == ""
    assert rows["predictor"][0]["overhead"] != ""
    assert out.with_suffix(".png").stat().st_size > 0
    assert not out.with_suffix("").exists()
    assert CliRunner().invoke(app, [*options, "--sections", "taus"]).exit_code == 2
