"""Each evaluation script, once, on a tiny model: what it writes."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from letters import letters
from tiny import SIZES, prompt, tiny_model
from transformers import LlamaConfig
from typer.testing import CliRunner

import common
import hf_offload
from hf_offload.tools import assets

Rows = list[dict[str, str]]
SAMPLES = "scout:samples=24,recent=16,block_size=16"
HGCA = "hgca:window=64,block_size=16"
WINDOW = "window:budget=64,sinks=8,block_size=8"


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are tiny, texts are code, which is found at once, or random tokens; tokens are letters."""
    code = assets.demo_text("code")
    for module in (assets, hf_offload):
        monkeypatch.setattr(module, "demo_text", lambda kind: code)
    tokenizer = letters()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}>"
    monkeypatch.setattr(common.Setting, "load", lambda *_: (tiny_model("llama"), tokenizer))
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: prompt(1, tokens, start)[0])


def run(script: str, out: Path, *options: str) -> Rows:
    """The rows that a script writes into a CSV."""
    app = common.command(importlib.import_module(script).main)
    done = CliRunner().invoke(app, [*options, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with out.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows]


class Run(NamedTuple):
    """A script, its options, what is changed in its module, and what is asked of its rows."""

    script: str
    options: str
    check: Callable[[Rows], bool]
    changes: dict[str, Any] = {}  # noqa: RUF012 - nobody writes into it


RUNS = {
    "attention_stats": Run("attention_stats", "--tokens 128",
        lambda rows: max(column(rows, "weight")) == pytest.approx(1, abs=1e-5)),
    "linear": Run("bench_cpu", "--sections linear --dtypes bf16 --threads 1 --rounds 2",
        lambda rows: {row["batch"] for row in rows if row["case"] == "linear"} == set("1248"),
        {"POOL_BYTES": 1 << 20, "WIDTHS": {"tiny": (64, 96, 32, 2, 160)}}),
    "context_attention": Run("context_attention", "--contexts 64 --rows full,window-1024 --steps 2 --rounds 1",
        lambda rows: max(column(rows, "kl")) < 1e-5 and all(float(r["attention"]) < float(r["step"]) for r in rows)),
    "a repeated text": Run(
        "context_attention", f"--contexts 600,300+400 --read 300 --rows full,{WINDOW} --steps 2 --rounds 1",
        lambda rows: max(column(rows[1::3], "kl")) < 1e-4 < min(column(rows[2::3], "kl"))),
    "cpu_ratio": Run("cpu_ratio", "--budget 192 --tokens 420 --steps 8",
        lambda rows: 0 < max(column(rows, "cpu_ratio")) <= 1, {"ROWS": {"recall-1.5": ("adaptive", 1.5)}}),
    "decode": Run("decode", "--contexts 60,40 --rows dynamic,static,full --batch 2 --steps 1 --rounds 1",
        lambda rows: [row["context"] for row in rows] == ["40"] * 3 + ["60"] * 3 and min(column(rows, "p50")) > 0),
    "frames": Run("frames", "--row window:budget=96 --context 200 --tiers one",
        lambda rows: len(rows) == 5 and min(column(rows, "frames")) > 0),
    "launches": Run("launches", "--row window:budget=96 --context 200",
        lambda rows: {"paged_attention_kernel", "write_token_kernel"} <= {row["kernel"] for row in rows}),
    "perplexity": Run("perplexity", "--rows full,hgca-0.4-1 --tokens 80 --batch 2 --texts code",
        lambda rows: float(rows[1]["perplexity"]) == pytest.approx(float(rows[1]["perplexity_full"]), rel=1e-2)
        and rows[2]["kept_share"] != "", {"BLOCK_SIZE": 16}),
    "prefill": Run(
        "prefill", "--lengths 64 --shapes 4x2x32 --dtypes float32 --rounds 2 --contexts 96 --chunks 0,64",
        lambda rows: [row["way"] for row in rows] == ["hf_offload", "torch", "matmul"] and rows[1]["of_torch"] == "1"),
    "quality": Run("quality", f"--row full --row {SAMPLES} --contexts 300 --steps 4 --kinds code --needles 1",
        lambda rows: float(rows[0]["kl"]) < 1e-5 < float(rows[1]["kl"])
        and float(rows[0]["read"]) > float(rows[1]["read"]) > 0),
    "needle": Run("quality", f"--ask needle --contexts 400 --limit 1 --kinds code --row full --row {WINDOW}",
        lambda rows: {row["task"] for row in rows} >= {"code", "average"}),
    "extraction": Run("quality", f"--ask extraction --records 10 --limit 1 --row full --row {SAMPLES}",
        lambda rows: rows[0]["kept"] == "1" and float(rows[1]["attended"]) > 0),
    "second turn": Run(
        "quality", "--ask second-turn --contexts 400 --steps 4 --limit 1 --kinds code --row full --row " + HGCA,
        lambda rows: [row["row"] for row in rows] == ["dynamic", "full", HGCA]
        and rows[0]["answer"] == rows[1]["answer"] and rows[2]["kept_share"] != ""),
    "error": Run("quality", "--ask error --contexts 1000 --steps 8 --kinds code --row scout:samples=64,block_size=16",
        lambda rows: [row["layer"] for row in rows] == ["all", *"0123"] and float(rows[0]["within"]) > 0.8),
    "rounding": Run("rounding", f"--contexts 300 --row {SAMPLES} --steps 16 --kinds code",
        lambda rows: min(column(rows[:6], "within")) > 0.9 and float(rows[6]["within"]) < 0.1),
    "save_load": Run("save_load", "--tokens 1100 --steps 3 --repeats 1 --rows scout:budget=1024,block_size=16",
        lambda rows: rows[0]["identical"] == "True" and 1 < float(rows[0]["fork_bytes"]) < 2),
}  # fmt: skip
SLOW = {
    "kernels": Run("bench_cpu", "--sections decode,scoring --dtypes bf16 --threads 1 --rounds 2",
        lambda rows: {"read", "choose_blocks", "blocks", "draw_pairs", "pairs"} <= {row["case"] for row in rows},
        {"POOL_BYTES": 1 << 26}),
    "soak": Run("soak", "--rows full:tier=one --steps 60 --every 10 --context 512",
        lambda rows: len(rows) == 6 and min(column(rows, "rss_bytes")) > 0),
    "serve": Run("serve", "--tokens 600 --chats 1,2 --answers 6 --repeats 1",
        lambda rows: all(float(rows[0][name]) > 0 for name in ("read_s", "first_token_s", "tokens_per_s_2"))),
    "families": Run(
        "families", "--types llama --jobs 1", lambda rows: (rows[0]["status"], rows[0]["held"]) == ("exact", "4")),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, options, check, changes = (RUNS | SLOW)[name]
    module = importlib.import_module(script)
    for attribute, value in changes.items():
        monkeypatch.setattr(module, attribute, value)
    if name == "second turn":  # random weights find nothing
        monkeypatch.setattr(assets.Needle, "found_in", lambda self, text: len(text) > 4)
    rows = run(script, tmp_path / "out.csv", *options.split())
    assert {"commit", "torch", "command"} <= rows[0].keys()
    assert check(rows), rows


def test_dtypes_of_a_file_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With three heads a group kernels are those of other tests.
    config = LlamaConfig(**SIZES | {"num_attention_heads": 6, "hidden_size": 96}, num_key_value_heads=2)
    models = {"as Transformers loads it": tiny_model(config), "unpacked, bfloat16": tiny_model(config).bfloat16()}
    monkeypatch.setattr("gguf_dtypes.models_of", lambda name: models)
    monkeypatch.setattr("gguf_dtypes.source_of", lambda name: ("folder", {}))
    monkeypatch.setattr("gguf_dtypes.AutoTokenizer", SimpleNamespace(from_pretrained=lambda *_, **__: letters()))
    rows = run("gguf_dtypes", tmp_path / "out.csv", "--prompt", "40", "--steps", "2", "--rounds", "1")
    assert [(row["way"], row["layers"]) for row in rows] == [(w, x) for w in models for x in ("stock", "fast_linear")]


def test_every_way_gives_the_logits_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = importlib.import_module("peers")

    class Here:
        """What is asked of a process, done in this one."""

        def __init__(self, workers: int, context: Any, begin: Callable[..., None], how: tuple[Any, ...]) -> None:
            begin(*how)
            self.way = peers._way

        def submit(self, work: Callable[..., Any], *arguments: Any) -> SimpleNamespace:
            monkeypatch.setattr(peers, "_way", self.way)
            result = work(*arguments)
            return SimpleNamespace(result=lambda: result)

    monkeypatch.setattr(peers, "tokenizer_of", lambda _: letters())
    monkeypatch.setattr(peers, "ProcessPoolExecutor", Here)
    options = [
        "--contexts",
        "40,320",
        "--policy",
        "scout:budget=192",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--dtype",
        "float32",
    ]
    options += ["--ways", "hf_offload,DynamicCache,StaticCache", "--picture", str(tmp_path / "peers.svg")]
    rows = run("peers", tmp_path / "out.csv", *options)
    kl = {(row["way"], row["context"]): abs(float(row["kl"])) for row in rows}
    assert max(kl["StaticCache", "320"], kl["hf_offload", "40"]) < 1e-6 < 1e-5 < kl["hf_offload", "320"]
    assert "<svg" in (tmp_path / "peers.svg").read_text()


def test_tasks_are_scored_and_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval.tasks.longbench.metrics", exc_type=ImportError, reason="needs lm-eval[longbench]")
    run_, asked = importlib.import_module("tasks.run"), []
    rows = [
        {"input": f"What is number {n}?", "context": "word " * 40, "answers": [f"number {n}"], "length": 40,
         "dataset": "qasper", "language": "en", "all_classes": None, "_id": f"id{n}"}
        for n in range(2)
    ]  # fmt: skip
    (tmp_path / "qasper.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["--tasks", "qasper,samsum", "--data-dir", str(tmp_path), "--new-tokens", "4", "--setup", "dense,sparse"]
    options += ["--row", "full", "--row", "dynamic"]
    real = run_.answer

    def answer(*given: Any) -> dict[str, Any]:
        asked.append(given)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(run_, "answer", answer)
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        run("longbench", tmp_path / "out.csv", *options)
    found = run("longbench", tmp_path / "out.csv", *options)
    assert len(asked) == 1 + 2 * 2 * 2
    said = {(row["setup"], row["row"]): (row["samples"], row["same"]) for row in found if row["task"] == "qasper"}
    assert said["dense", "dynamic"] == said["sparse", "dynamic"] == ("2", "1")  # as Transformers' own cache answers
    sample = importlib.import_module("longbench").samples_of("qasper", rows)[0]
    assert [sample.score(said) for said in ("Number 0!", "number 7", "")] == [100, 50, 0]


def test_tasks_of_ruler_fit_and_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wonderwords", reason="needs lm-eval[ruler]: pip install hf-offload[eval]")
    kinds = {kind + s: list("abcdefghijklmnopqrst") for kind in ("noun", "adjective", "verb") for s in ("", "s")}
    monkeypatch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=kinds))
    monkeypatch.setattr("nltk.download", lambda *_: True)
    ruler, novel = importlib.import_module("ruler"), tmp_path / "novel.txt"
    novel.write_text(" ".join(f"Sentence {n} of the novel is short." for n in range(900)))
    sample, _ = ruler.samples_of("niah_single_2", 4096, letters(), 2, tmp_path, novel)
    number = sample.prompt.partition(" is: ")[2].partition(".")[0]
    assert 2000 < len(sample.prompt + sample.start) <= 4096
    assert (sample.score(f"It is {number}."), sample.score("nothing")) == (100, 0)
    assert ruler.samples_of("qa_hotpot", 4096, letters(), 2, tmp_path, novel) == []


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is loaded; `--help` names the option."""
    monkeypatch.setattr(common.Setting, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    for script, options in {
        "attention_stats": "--kinds", "bench_cpu": "--sections", "context_attention": "--kind",
        "decode": "--rows --dtype", "families": "--types", "frames": "--context", "launches": "--row",
        "longbench": "--tasks --setup", "peers": "--ways", "perplexity": "--texts", "quality": "--ask --kinds",
        "serve": "--chats", "soak": "--rows",
    }.items():  # fmt: skip
        app = common.command(importlib.import_module(script).main)
        told = CliRunner().invoke(app, ["--help"]).output
        for option in options.split():
            result = CliRunner().invoke(app, [option, "nonesuch"])
            assert (result.exit_code, "nonesuch" in result.output, option in told) == (2, True, True), (script, option)


def test_a_long_prompt_loses_its_middle_and_keeps_its_frame() -> None:
    prompts, samples = importlib.import_module("tasks.prompts"), importlib.import_module("tasks.samples")
    model, tokenizer = common.Setting().load()
    text = "".join(map(str, range(100)))
    sample = samples.Sample("qa", "1", f"{text}\nWhy?", "\nWhy?", 8, float, start="!")
    made = prompts.Prompter(model, tokenizer, 33, True)(sample)
    assert tokenizer.decode(made.ids[0]) == f"[{text[:14]}{text[-9:]}\nWhy?]>!"
    assert (made.whole, made.asked) == (32 + len(text) + 5 - 29, len("Why?]>!"))
