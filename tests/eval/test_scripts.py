"""Help and argument checks of every evaluation script, before a model is loaded."""

import csv

import pytest
from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

import attention_stats
import bench_cpu
import common
import context_attention
import cpu_ratio
import decode
import error_estimate
import extraction
import frames
import gguf_dtypes
import launches
import needle
import perplexity
import quality
import save_load
import second_turn
import serve
import soak

MAINS = [
    cpu_ratio.main,
    decode.main,
    error_estimate.main,
    extraction.main,
    needle.main,
    perplexity.main,
    quality.main,
    save_load.main,
    second_turn.main,
    serve.main,
]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_help(main):
    result = CliRunner().invoke(common.command(main), ["--help"])
    assert result.exit_code == 0
    assert "--threads" in result.output


@pytest.mark.slow
def test_the_kernel_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_cpu, "POOL_BYTES", 1 << 26)
    out = tmp_path / "bench.csv"
    options = ["--sections", "torch,selection,pairs", "--dtypes", "bf16", "--rounds", "2", "--out", str(out)]
    result = CliRunner().invoke(common.command(bench_cpu.main), options)
    assert result.exit_code == 0, result.output
    with open(out, newline="") as lines:
        names = {row["case"] for row in csv.DictReader(lines)}
    assert {"read", "blocks", "torch.topk", "torch: gather, sdpa with enable_gqa"} <= names
    assert {"draw_pairs", "pairs"} <= names
    assert out.with_suffix(".png").stat().st_size > 0


def test_products_of_a_few_rows_are_timed_beside_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_cpu, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(bench_cpu, "WIDTHS", {"tiny": (64, 96, 32, 2, 160)})
    out = tmp_path / "bench.csv"
    options = ["--sections", "linear", "--dtypes", "bf16", "--threads", "1", "--rounds", "2", "--out", str(out)]
    result = CliRunner().invoke(common.command(bench_cpu.main), options)
    assert result.exit_code == 0, result.output
    with open(out, newline="") as lines:
        found = {(row["case"], row["batch"]) for row in csv.DictReader(lines)}
    cases = ("read", "linear", "torch: linear", "torch: linear again")
    assert found == {(case, batch) for case in cases for batch in "1248"}


def test_dtypes_of_a_file_take_turns(tmp_path, monkeypatch):
    models = {"as Transformers loads it": tiny_model("llama"), "unpacked, bfloat16": tiny_model("llama").bfloat16()}
    monkeypatch.setattr(gguf_dtypes, "models_of", lambda name: models)
    monkeypatch.setattr(gguf_dtypes, "source_of", lambda name: ("folder", {}))
    monkeypatch.setattr(gguf_dtypes.AutoTokenizer, "from_pretrained", lambda *_, **__: letters())
    out = tmp_path / "dtypes.csv"
    options = ["--prompt", "40", "--steps", "2", "--rounds", "1", "--out", str(out)]
    result = CliRunner().invoke(common.command(gguf_dtypes.main), options)
    assert result.exit_code == 0, result.output
    with open(out, newline="") as lines:
        found = [(row["way"], row["layers"], row["dtype"]) for row in csv.DictReader(lines)]
    assert found == [
        (way, layers, dtype)
        for way, dtype in zip(models, ("float32", "bfloat16"), strict=True)
        for layers in ("stock", "fast_linear")
    ]


@pytest.mark.slow
def test_the_soak_runs_and_finds_a_leak(tmp_path):
    out = tmp_path / "soak.csv"
    options = ["--rows", "full:tier=one", "--steps", "60", "--every", "10", "--context", "512", "--out", str(out)]
    result = CliRunner().invoke(common.command(soak.main), options)
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 7
    assert out.with_suffix(".png").stat().st_size > 0
    leak = [{"step": step, "rss_bytes": 1000 + 8 * max(step, 40)} for step in range(0, 100, 10)]
    assert soak.slope(leak, "rss_bytes") == pytest.approx(8)


@pytest.mark.parametrize(
    ("main", "option"),
    [
        (attention_stats.main, "--layers"),
        (bench_cpu.main, "--sections"),
        (bench_cpu.main, "--dtypes"),
        (context_attention.main, "--rows"),
        (context_attention.main, "--kind"),
        (cpu_ratio.main, "--kind"),
        (decode.main, "--rows"),
        (decode.main, "--contexts"),
        (quality.main, "--rows"),
        (quality.main, "--kinds"),
        (frames.main, "--context"),
        (launches.main, "--row"),
        (needle.main, "--row"),
        (needle.main, "--kinds"),
        (soak.main, "--rows"),
        (save_load.main, "--rows"),
        (save_load.main, "--kind"),
        (perplexity.main, "--rows"),
        (perplexity.main, "--betas"),
        (perplexity.main, "--texts"),
        (serve.main, "--kind"),
        (serve.main, "--chats"),
        (second_turn.main, "--rows"),
        (second_turn.main, "--kinds"),
        (decode.main, "--kind"),
    ],
)
def test_unknown_names_are_refused(main, option, monkeypatch):
    monkeypatch.setattr(common.assets, "load_demo_model", lambda *a, **k: pytest.fail("the model was loaded"))
    result = CliRunner().invoke(common.command(main), [option, "nonesuch"])
    assert result.exit_code == 2
    assert "nonesuch" in result.output


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_unknown_dtype_is_refused(main):
    result = CliRunner().invoke(common.command(main), ["--dtype", "int3"])
    assert result.exit_code == 2
    assert "int3" in result.output
