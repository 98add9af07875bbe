"""The script of quality against cost: measurements, Pareto fronts, resumed runs."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import pareto
from hf_offload import assets, measuring

TOKEN = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes


def lines(*points: tuple[float, float, float, float]) -> list[dict[str, Any]]:
    names = ("kl", "host", "device", "ms")
    return [{"row": str(i), **dict(zip(names, point, strict=True))} for i, point in enumerate(points)]


def test_fronts_and_the_cheapest() -> None:
    rows = lines((0.0, 9, 9, 9), (0.01, 2, 4, 5), (0.02, 2, 3, 6), (0.5, 1, 1, 1))
    pareto.fronts(rows)
    assert [row["front"] for row in rows] == ["host device ms", "host device ms", "device", "host device ms"]
    table = {line["KL at most"]: line for line in pareto.best(rows)}
    assert table[0.02]["device"] == "2 (3)"
    assert table[0.02]["ms"] == "1 (5)"
    assert table[0.005]["host"] == "0 (9)"


def test_divergence_by_hand() -> None:
    full = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    mine = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    kl, top = measuring.divergence(mine, full)
    want = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.3 * torch.tensor(0.3 / 0.6).log()
    torch.testing.assert_close(kl, torch.stack([want, torch.tensor(0.0)]))
    assert top == 0.5


@pytest.mark.parametrize(
    ("policy", "options", "tokens"),
    [
        ("full", {"resident": 64}, 310 - 64),  # what is not resident
        ("full", {"resident": 64, "host": "fetch"}, 310 - 64),
        ("window", {"budget": 128}, 0),
        ("window", {"budget": 128, "resident": 96}, 32),
        ("hgca", {"window": 64, "beta": 0.0}, 310 - 64),
    ],
)
def test_bytes_of_the_host(policy: str, options: dict[str, Any], tokens: int) -> None:
    """Around the middle of the steps 310 tokens are cached; blocks are whole."""
    model = tiny_model("llama")
    reading = measuring.read(model, prompt(1, 320)[0], 20)
    found = measuring.cost(model, policy, {"tier": "split", "block_size": 16, **options}, reading)
    assert found.host_bytes == pytest.approx(tokens * TOKEN, abs=24 * TOKEN)
    assert len(found.kl) == 20
    if policy in ("full", "hgca"):
        assert found.kl.max() < 1e-5
        assert found.top1 == 1
    one = measuring.cost(model, policy, {"block_size": 16, **options} | {"tier": "one"}, reading)
    assert one.host_bytes is None
    torch.testing.assert_close(one.kl, found.kl, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_every_row_is_measured_and_a_stopped_run_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 240)[0]

    class Tokenizer:
        @staticmethod
        def decode(ids: Any, **_: Any) -> str:
            return "7"

    monkeypatch.setattr(pareto, "load", lambda *_: (tiny_model("llama"), Tokenizer()))
    monkeypatch.setattr(pareto, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(pareto, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    monkeypatch.setattr(assets, "random_needle", lambda *_, **__: assets.Needle(ids, "7"))
    follow, asked = pareto.follow, []

    def stops(model: Any, setting: str, reading: Any) -> dict[str, Any]:
        asked.append(setting)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return follow(model, setting, reading)

    monkeypatch.setattr(pareto, "follow", stops)
    out = tmp_path / "pareto.csv"
    rows = ["--row", "full", "--row", "scout:budget=192,recent=0", "--row", "h2o:heavy=0.1"]
    options = [*rows, "--tokens", "220", "--steps", "6", "--kinds", "code", "--needles", "2", "--out", str(out)]
    assert CliRunner().invoke(common.command(pareto.main), options).exit_code != 0
    result = CliRunner().invoke(common.command(pareto.main), options)
    assert result.exit_code == 0, result.output
    assert asked == ["full", "scout:budget=192,recent=0", "scout:budget=192,recent=0", "h2o:heavy=0.1"]
    with out.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [line["row"] for line in found] == rows[1::2]
    assert [(line["found"], line["of"]) for line in found] == [("2", "2")] * 3
    assert float(found[0]["kl"]) < 1e-5 < float(found[1]["kl"])
    assert out.with_suffix(".png").stat().st_size > 0
    assert not out.with_suffix(".state").exists()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("nonesuch:budget=64", "unknown policies nonesuch"),
        ("dynamic", "unknown policies dynamic"),
        ("scout:64", "not a policy with options"),
        ("scout:budget=32", "--row scout:budget=32: budget=32 is less than"),
        ("fluxion:predictor=/there/none.safetensors", "--row fluxion:predictor=none.safetensors: "),
    ],
)
def test_what_cannot_be_run_is_told_before_a_text_is_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, row: str, told: str
) -> None:
    monkeypatch.setattr(pareto, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(measuring, "read", lambda *_: pytest.fail("a text was read"))
    options = ["--row", "full", "--row", row, "--kinds", "code", "--out", str(tmp_path / "pareto.csv")]
    result = CliRunner().invoke(common.command(pareto.main), options)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.replace("│", " ").split())
