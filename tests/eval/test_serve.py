"""The script for servers: what it computes, and a run of it with SmolLM2."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

import common
import serve


def test_tokens_a_second_while_all_answer() -> None:
    first, second = serve.Answer(times=[1, 2, 3, 4]), serve.Answer(times=[2, 3, 4, 5, 6])
    assert serve.tokens_per_s([first, second]) == pytest.approx(4 / 2)
    assert serve.tokens_per_s([first]) == pytest.approx(3 / 3)


def test_weights_for_llama_are_named(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.touch()
    result = CliRunner().invoke(common.command(serve.main), ["--llama-server", str(program), "--model", "x"])
    assert result.exit_code == 2
    assert "--gguf" in result.output


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    out = tmp_path / "serve.csv"
    options = ["--tokens", "600", "--chats", "1,2", "--answers", "6", "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(common.command(serve.main), options)
    assert result.exit_code == 0, result.output
    (row,) = csv.DictReader(out.open())
    assert row["way"] == "hf_offload"
    for name in ("read_s", "first_token_s", "by_hand_s", "tokens_per_s_1", "tokens_per_s_2"):
        assert float(row[name]) > 0, name
