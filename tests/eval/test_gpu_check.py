"""The GPU check without a GPU: every part on tiny sizes, and the supervision of its cases."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import CpuRecorder
from typer.testing import CliRunner

import common
import gpu_check
from gpu import aims, decoding, handoff, host_time, merging, models, pieces, recalls, timeline, trained
from gpu.operations import OPERATIONS
from gpu.options import Options
from gpu.replay import parse, write_script
from gpu.results import Results
from gpu.supervise import NotApplicable
from gpu.timing import Timer
from hf_offload import HybridCache, Scout
from hf_offload.gpu import kv_copy
from hf_offload.gpu.kv_copy import FETCHERS
from hf_offload.graph.cuda_graph import StepGraph, graphed

QUICK = Options("cpu", quick=True, layers=2, contexts=(256,), batches=(2,), rows=("scout",), budget=64, steps=4)


def invoke(*options: str) -> Any:
    return CliRunner().invoke(common.command(gpu_check.main), ["--quick", "--device", "cpu", *options])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    rows = ["--rows", "dynamic,scout,full-resident,scout-graph"]
    done = invoke("--out", str(tmp_path), *rows, "--replay", "miss=0.2,drift=0.3,recall=2", "--minutes", "30")
    assert done.exit_code == 0, done.output
    cases = table(tmp_path / "cases.csv")
    assert {case["part"] for case in cases} == set(gpu_check.PARTS) - {"trained"}
    missing = [case["case"].split(",")[0] for case in cases if case["status"] != "done"]
    assert missing == ["host time of a replay"] * len(host_time.POLICIES) + ["scout-graph"]
    pieces_of = {row["piece"] for row in table(tmp_path / "pieces.csv")}
    assert pieces_of == {name.split(", ")[0] for name in pieces.names(QUICK)} - {"host time of a replay"}
    assert (tmp_path / "failed.txt").read_text() == ""
    (tests,) = table(tmp_path / "correctness.csv")
    assert (tests["status"], tests["passed"]) == ("passed", "1")
    kernels = table(tmp_path / "kernels.csv")
    speeds = {f"speed: {way}" for way in ("device", "link", "back", "pin")}
    assert {row["operation"] for row in kernels} == {*OPERATIONS, *speeds}
    assert all(float(row["of_floor"]) > 0 for row in kernels if row["p50"])
    handed = table(tmp_path / "handoff.csv")
    assert {row["work"] for row in handed} == {"kernels alone", *handoff.WORKS}
    assert all(float(row["p50"]) > 0 for row in handed)
    decoded = {row["row"]: row for row in table(tmp_path / "decode.csv")}
    assert "GPU" in decoded["scout-graph"]["note"]
    assert float(decoded["dynamic"]["tokens_per_s"]) > 0
    assert {row["replay"] for name, row in decoded.items() if "scout" in name} == {"miss=0.2,drift=0.3,recall=2"}
    assert float(decoded["scout"]["recall_mib_per_step"]) > 0
    assert {"commit", "gpu", "cpu", "torch", "triton", "script_miss"} <= set(decoded["scout"])
    assert {row["met"] for row in table(tmp_path / "aims.csv")} == {"not measured"}  # a CPU tells nothing of them
    assert "MemTotal" in (tmp_path / "env.txt").read_text()
    with tarfile.open(tmp_path.with_name(f"{tmp_path.name}.tar.gz")) as archive:
        files = {f"./{name}.csv" for name in ("aims", "cases", *gpu_check.PARTS)} - {"./trained.csv"}
        assert files <= set(archive.getnames())


def test_a_part_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ArithmeticError("the caches do not add up")

    monkeypatch.setattr(decoding, "measure", broken)
    done = invoke("--part", "decode", "--rows", "scout,full-resident", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert [case["status"] for case in table(tmp_path / "cases.csv")] == ["failed", "failed"]
    assert "the caches do not add up" in (tmp_path / "failed.txt").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--part", "nonesuch"], "nonesuch"),
        (["--rows", "nonesuch"], "nonesuch"),
        (["--replay", "miss=2,drift=0"], "miss=2"),
        (["--replay", "mist=0.1"], "mist"),
        (["--contexts", "8x"], "8x"),
        (["--part", "trained"], "--model"),
    ],
)
def test_wrong_options_are_refused(options: list[str], named: str, tmp_path: Path) -> None:
    done = invoke(*options, "--out", str(tmp_path))
    assert done.exit_code == 2
    assert named in done.output


def test_rows_over_the_cap_are_not_measured() -> None:
    model = models.build(QUICK)
    for cap, name in ((1e-6, "full-resident"), (1e-4, "dynamic"), (5e-5, "scout-quest")):
        options = dataclasses.replace(QUICK, kv_gib=cap)
        row = decoding.make_row(options, name, None, 8, 1024)
        with pytest.raises(NotApplicable, match=r"does not fit: .* GiB on the device"):
            models.check_room(options, model, row, 2, 1024)
    row = decoding.make_row(QUICK, "full-resident", None, 8, 1024)
    models.check_room(QUICK, model, row, 2, 1024)
    with pytest.raises(NotApplicable, match=r"does not fit: .* GiB on the host"):
        models.check_room(dataclasses.replace(QUICK, host_gib=1e-4), model, row, 2, 1024)
    row = decoding.make_row(QUICK, "scout", None, 8, 1 << 20)
    models.check_room(dataclasses.replace(QUICK, host_gib=1e6), model, row, 2, 1 << 20)


def test_memory_is_estimated_as_it_is() -> None:
    model = models.build(QUICK)
    row = decoding.make_row(QUICK, "scout", None, 8, 2048)
    with torch.no_grad():
        cache = models.fill(QUICK, model, row, 1, models.random_kv(QUICK, 2, 16, 2032))
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)
    measured = cache.stats().as_dict()
    resident = models.kv_bytes(model.config, QUICK.budget, 4)
    assert measured["resident_bytes"] == resident
    sealed = models.digest_bytes(model.config, 2048, 8)
    assert 0.9 * sealed < measured["digest_bytes"] <= 1.5 * sealed


@pytest.mark.parametrize("name", ["scout", "scout-quest", "full-resident"])
def test_what_grows_does_so_before_the_steps_that_count(name: str) -> None:
    """A pool that is short of blocks pins a quarter more, which takes seconds and has a graph captured anew."""
    model, block, context = models.build(QUICK), 8, 1024
    tokens = decoding.filled_tokens(context, block)
    assert (tokens + 3) % block == 0
    kv = models.random_kv(QUICK, 2, 16, tokens - models.PROMPT)
    with torch.no_grad():
        cache = models.fill(QUICK, model, decoding.make_row(QUICK, name, None, block, context), 3, kv)
        sizes = []
        for _ in range(2 * block):
            model(input_ids=torch.tensor([[5]] * 3), past_key_values=cache)
            sizes.append([(len(x.store.pool.block_ptr), x.store.table.shape[1]) for x in cache.layers])
        handed_over = any(layer.host_partial is not None for layer in cache.layers)
    assert handed_over == (name != "full-resident")  # all its blocks are resident in each step
    assert sizes == [sizes[0]] * len(sizes)
    assert sizes[0][0][0] == 3 * -(-(tokens + 4 * block) // block)


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_a_merge_that_sees_an_old_partial_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = merging.replays(QUICK)
    assert (right["replays"], right["wrong"]) == (4, 0)

    def stale(out: torch.Tensor, lse: torch.Tensor, host: Any, query: torch.Tensor, *_: Any, **knobs: Any) -> Any:
        return torch.where(host.out == 3, 2, host.out), lse

    monkeypatch.setattr(merging, "merge", stale)
    rows = merging.replays(QUICK)
    assert next(rows)["wrong"] == 1
    with pytest.raises(ArithmeticError, match="1 of 4 replays merged another partial, the first is 3"):
        next(rows)


def test_a_fetch_is_timed_by_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(recalls, "fetch_all", lambda x: seen.append(kv_copy.FETCHERS) or recalls.fetch_recall(x))
    rows = list(recalls.fetch(QUICK, programs=16))
    assert [row["programs"] for row in rows] == seen * 2 == [16, 16]
    assert kv_copy.FETCHERS == FETCHERS


@pytest.mark.parametrize("policy", host_time.POLICIES)
def test_the_way_of_a_replayed_step_is_marked(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks are functions of the package by name: this fails if they are others."""
    monkeypatch.setattr(host_time, "LAYERS", 2)
    monkeypatch.setattr(host_time, "PROMPT", 160)
    model = host_time.small_model(QUICK)
    cache = HybridCache(model, Scout(budget=192) if policy == "scout" else policy, resident=320, tier="split")
    cache.graph, cache._graphed = StepGraph(cache, CpuRecorder), graphed(model)
    with torch.no_grad():
        marks = host_time.marks_of(QUICK, model, cache, steps=2)
    assert list(marks) == list(host_time.MARKS)
    assert list(marks.values()) == sorted(marks.values())


# --- the aims ---------------------------------------------------------------------------------------------------------


def timed(row: str, context: int, batch: int, p50: float, replay: str = "none", **more: Any) -> dict[str, Any]:
    """A row of decoding."""
    rate = 1000 * batch / p50
    return {
        "row": row,
        "context": context << 10,
        "batch": batch,
        "replay": replay,
        "p50": p50,
        "tokens_per_s": rate,
    } | more


MEASURED = {
    "pieces": [
        {"piece": "merge", "variant": "copied", "batch": 8, "in_graph": 13.0},
        {"piece": "merge", "variant": "read", "batch": 1, "in_graph": 4.0},
        {"piece": "merge", "variant": "read", "batch": 8, "in_graph": 9.0},
        {"piece": "fetch", "programs": 64, "alone": 22.0, "beside": 44.0},
        {"piece": "fetch", "programs": FETCHERS, "variant": "8 % of the slots"},
        {"piece": "fetch", "programs": FETCHERS, "alone": 22.0, "beside": 27.5},
    ],
    "kernels": [
        {"operation": "paged_attention", "tokens": 2048, "of_floor": 3.0},
        {"operation": "paged_attention", "tokens": 32768, "of_floor": 1.1},
        {"operation": "paged_attention", "tokens": 32768, "of_floor": 1.4},
    ],
    "handoff": [
        {"work": "nothing", "p50": 18.0},
        {"work": "nothing", "p50": 9.0},
        {"work": "kernels alone", "p50": 5.0},
    ],
    "decode": [
        timed("scout-graph", 32, 1, 10.0, aims.FEW),
        timed("scout", 32, 1, 14.0, aims.FEW),
        timed("full-resident-graph", 32, 1, 8.0),
        timed("default-graph", 32, 1, 8.2),
        timed("scout-graph", 32, 8, 12.5, aims.FEW, busy=0.9, waiting=0.04, moving=0.02, gaps=0.04),
        timed("offloading", 32, 8, 250.0),
        timed("dynamic", 64, 1, 20.0),
        timed("full-resident-graph", 64, 1, 10.0),
        timed("scout-graph", 64, 4, 16.0, aims.FEW),
        timed("scout-graph", 64, 8, 25.0, aims.FEW),
        timed("scout-graph", 64, 8, 40.0, aims.MANY),
        {"row": "dynamic", "context": 65536, "batch": 4, "replay": "none", "note": "does not fit"},
    ],
}


def test_aims_are_told_from_what_was_measured(tmp_path: Path) -> None:
    before = Results(tmp_path, None)
    for row in MEASURED["kernels"]:
        before.add("kernels", row)
    results = Results(tmp_path, None)  # a later call, into the same folder
    results.rows |= {name: rows for name, rows in MEASURED.items() if name != "kernels"}
    rows = aims.aims(results.table)
    found = [row["measured"] for row in rows]
    assert found == pytest.approx([9.0, 1.25, 1.4, 9.0, 0.06, 1.25, 1.025, 3.2, 2.0, 6.4, 20.0, 1.4])
    missed = [number for number, row in enumerate(rows) if row["met"] != "yes"]
    assert missed == [2, 5, 7, 8, 11]
    assert {row["met"] for row in aims.aims(lambda name: [])} == {"not measured"}


def test_what_the_aims_compare_is_measured_first() -> None:
    whole = Options(contexts=decoding.CONTEXTS, batches=decoding.BATCHES, rows=decoding.DEFAULT_ROWS)
    found = list(decoding.cases(whole).values())
    assert tuple(found[: len(aims.CASES)]) == aims.CASES
    more = sum(case[3] == aims.MANY for case in aims.CASES)
    assert len(set(found)) == len(found) == more + len(decoding.CONTEXTS) * len(decoding.BATCHES) * len(whole.rows)
    assert {replay is None for _, _, row, replay in found if decoding.chooses(row)} == {False}
    assert {replay for _, _, row, replay in found if not decoding.chooses(row)} == {None}
    some = dataclasses.replace(whole, contexts=(8 << 10,), replay="miss=0.1,drift=0.1")
    replays = {(context, row, replay) for context, _, row, replay in decoding.cases(some).values()}
    assert replays == {(8 << 10, row, some.replay if decoding.chooses(row) else None) for row in whole.rows}


# --- the scripted choice ----------------------------------------------------------------------------------------------


def test_a_script_is_what_is_attended() -> None:
    options = dataclasses.replace(QUICK, budget=512, contexts=(4096,))
    model = models.build(options)
    script = decoding.script_of(options, "miss=0.08,drift=0.15,recall=4", 2, 4096, 2, 8)
    tokens = decoding.filled_tokens(4096, 8)
    ratios = {}
    for name in ("scout", "scout-off", "scout-no-recall"):
        row = decoding.make_row(options, name, script, 8, 4096)
        with torch.no_grad():
            cache = models.fill(options, model, row, 2, models.random_kv(options, 2, 16, tokens - models.PROMPT))
            for _ in range(12):
                model(input_ids=torch.tensor([[5], [6]]), past_key_values=cache)
        total = cache.stats().as_dict()
        assert (total["recalls"] > 0) == (name != "scout-no-recall")
        ratios[name] = total["cpu_ratio"]
    assert ratios["scout"] == ratios["scout-off"] == pytest.approx(script.miss, rel=0.08)
    assert ratios["scout-no-recall"] > 1.3 * ratios["scout"]


@pytest.mark.parametrize("text", aims.SCRIPTS)
def test_the_scripts_of_the_check_can_be_followed(text: str) -> None:
    wanted = parse(text)
    script = write_script((2, 8), [1000] * 40, 64, (1, 5), **wanted, device="cpu")
    assert script.miss == pytest.approx(wanted["miss"], abs=0.01)
    assert script.drift == pytest.approx(wanted["drift"], abs=0.02)


@pytest.mark.parametrize("recall", [0, 5])
def test_scripts_drift_and_miss_as_they_are_told(recall: int) -> None:
    steps, k = [200] * 20 + [201] * 20, 32
    script = write_script((2, 40), steps, k, (1, 4), miss=0.08, drift=0.12, recall=recall, device="cpu")
    assert script.chosen.shape == (40, 2, 40, k)
    assert (script.chosen.diff(dim=-1) > 0).all()
    assert (script.resident.diff(dim=-1) > 0).all()
    assert (script.chosen[..., 0] == 0).all()
    for step, blocks in enumerate(steps):
        assert (script.chosen[step, ..., -4:] == torch.arange(blocks - 4, blocks)).all()
    assert script.miss == pytest.approx(0.08, abs=0.01)
    assert 0.08 < script.drift <= 0.125
    line = [set(blocks.tolist()) for blocks in script.chosen[:20, 0, 0]]
    moved = [len(later - earlier) for earlier, later in itertools.pairwise(line)]
    assert 0.02 < np.mean(moved) / k < 0.25


def test_a_context_that_is_too_short_for_a_script_is_refused() -> None:
    with pytest.raises(ValueError, match="40 blocks are too few"):
        write_script((1, 1), [40], 32, (1, 4), miss=0.1, drift=0.1, recall=0, device="cpu")
    assert parse("miss=0.1, drift=0.2") == {"miss": 0.1, "drift": 0.2, "recall": 8.0}


# --- the times --------------------------------------------------------------------------------------------------------


def test_caches_are_filled_by_reading() -> None:
    """What a call finds written in a cache goes to memory while the call is timed."""
    timer, calls = Timer(QUICK), []
    timer.device_time(lambda: calls.append(timer._other._version))
    assert calls == [0] * (1 + timer.rounds)


# --- trained weights --------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 160 for letter in text]}


def test_a_model_with_trained_weights_chooses_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "load", lambda *arguments: (models.build(QUICK), Letters()))
    done = invoke("--part", "trained", "--model", "a folder", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    rows = {row["row"]: row for row in table(tmp_path / "trained.csv")}
    assert {(name, row["replay"]) for name, row in rows.items()} == {("full-resident", "none"), ("scout", "none")}
    assert float(rows["full-resident"]["cpu_ratio"]) == 0 < float(rows["scout"]["cpu_ratio"])


def test_rows_of_a_real_text_begin_apart() -> None:
    ids = trained.texts(Letters(), 3, 100)  # type: ignore[arg-type]
    assert ids.shape == (3, 100)
    whole = trained.texts(Letters(), 1, 100 + 2 * trained.APART)[0]  # type: ignore[arg-type]
    assert all(torch.equal(row, whole[trained.APART * i :][:100]) for i, row in enumerate(ids))


# --- the timeline -----------------------------------------------------------------------------------------------------


def event(name: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start}


def test_shares_of_a_timeline() -> None:
    events = [
        event("paged_attention_kernel", 0, 30),
        event("fetch_kernel", 20, 50),  # 20 of them beside nothing but the wait and a gap
        event("wait_kernel", 30, 40),
        event("merge_kernel", 60, 100),
        event("Memcpy DtoH", 60, 70),
    ]
    found = timeline.shares(events, 2)
    shares = {"busy": 0.7, "waiting": 0.1, "moving": 0.1, "gaps": 0.1}
    assert found == pytest.approx({**shares, "launches": 2.5, "profiled": 0.05})
    assert set(timeline.shares([], 2).values()) == {None}


def test_a_profiler_does_not_count_as_a_gap() -> None:
    assert timeline.between(0.045, {"gaps": 0.1, "profiled": 0.05}) == pytest.approx(0.0)
    assert timeline.between(5.0, timeline.shares([], 2)) is None
    rows = table(common.RESULTS / "h100" / "decode.csv")
    found = {row["row"]: row for row in rows if (row["context"], row["batch"]) == ("32768", "1")}
    for name, idle in (("full-resident-graph", 3.7), ("scout-graph", 3.5)):
        row = {key: float(found[name][key] or "nan") for key in ("p50", "gaps", "profiled")}
        assert timeline.between(row["p50"], row) == pytest.approx(idle, abs=0.1), name


def test_times_by_kernel() -> None:
    events = [event("merge_kernel", 0, 4), event("wait_kernel", 5, 25), event("merge_kernel", 30, 36)]
    rows = timeline.by_kernel(events, 2)
    assert rows == [
        {"kernel": "wait_kernel", "per_step": 0.5, "us_per_step": 10, "us_each": 20},
        {"kernel": "merge_kernel", "per_step": 1, "us_per_step": 5, "us_each": 5},
    ]
    assert timeline.by_kernel(events, 2, most=1) == rows[:1]
