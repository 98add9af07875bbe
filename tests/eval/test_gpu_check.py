"""The GPU check without a GPU: every part on tiny sizes, its processes, suites and results."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import common
import gpu_check
from gpu import correctness, decoding, models, supervise
from gpu.operations import OPERATIONS
from gpu.options import Options
from gpu.replay import parse, write_script
from gpu.results import Results
from gpu.supervise import NotApplicable
from hf_offload import Scout

from . import _troubled

QUICK = Options("cpu", quick=True, rows="scout").made_tiny()
META = {"commit": "a", "gpu": "none"}


def invoke(*options: str) -> Any:
    return CliRunner().invoke(common.command(gpu_check.main), ["--quick", "--device", "cpu", *options])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    rows = ["--rows", "dynamic,scout,full-resident,scout-graph"]
    done = invoke("--out", str(tmp_path), *rows, "--replay", "miss=0.2,drift=0.3,recall=2", "--minutes", "30")
    assert done.exit_code == 0, done.output
    cases = table(tmp_path / "cases.csv")
    assert {case["part"] for case in cases} == set(gpu_check.PARTS)
    missing = [case["case"].split(",")[0] for case in cases if case["status"] != "done"]
    assert missing == ["scout-graph", "offloading"]
    assert [row["passed"] for row in table(tmp_path / "correctness.csv")] == ["1"]
    kernels = table(tmp_path / "kernels.csv")
    assert {row["operation"] for row in kernels} >= {*OPERATIONS, "speed: link"}
    assert all(float(row["of_floor"]) > 0 for row in kernels if row["p50"])
    decoded = {row["row"]: row for row in table(tmp_path / "decode.csv")}
    assert "GPU" in decoded["scout-graph"]["note"]
    assert float(decoded["scout"]["recall_mib_per_step"]) > 0
    with tarfile.open(tmp_path.with_name(f"{tmp_path.name}.tar.gz")) as archive:
        assert {f"./{name}.csv" for name in ("cases", *gpu_check.PARTS)} <= set(archive.getnames())


def test_a_part_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ArithmeticError("the caches do not add up")

    monkeypatch.setattr(decoding, "measure", broken)
    done = invoke("--part", "decode", "--rows", "scout,full-resident", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert [case["status"] for case in table(tmp_path / "cases.csv")] == ["failed", "failed"]
    assert "the caches do not add up" in (tmp_path / "failed.txt").read_text()


@pytest.mark.parametrize(
    ("options", "named"), [(["--part", "nonesuch"], "nonesuch"), (["--replay", "miss=2"], "miss=2")]
)
def test_wrong_options_are_refused(options: list[str], named: str, tmp_path: Path) -> None:
    done = invoke(*options, "--out", str(tmp_path))
    assert done.exit_code == 2
    assert named in done.output


def test_a_case_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a failure a new process goes on: the device, or its allocator, may be of no use any more."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(common.__file__).parents[1]}")
    monkeypatch.setattr(_troubled, "__name__", "_troubled")
    results = Results(tmp_path, META)
    supervise.supervise("troubled", _troubled, QUICK, results, 3000)
    told = {row["case"]: (row["status"], row["note"]) for row in results.table("cases")}
    assert told == {
        "first": ("done", None), "raises": ("failed", "ArithmeticError: seven"),
        "cannot": ("not applicable", "no room"), "dies": ("failed", "the process ended with status 9"),
        "hangs": ("failed", "took too long"), "has no memory": ("not applicable", "3 GiB are missing"),
        "last": ("done", None),
    }  # fmt: skip
    processes = [row["process"] for row in results.table("troubled")]
    first, raises, cannot, dies, hangs, full, last = processes
    assert first == raises != cannot == dies != hangs != full != last


def test_a_later_call_keeps_what_was_told_of_other_parts(tmp_path: Path) -> None:
    for commit, parts, text in (("a", ["one"], "=== is no case"), ("b", ["two", "six"], "two"), ("c", ["six"], "six")):
        results = Results(tmp_path, META | {"commit": commit})
        results.begin(parts, ())
        for part in parts:
            results.case(part, "a case", "failed", note=text)
            results.add(part, {"x": 1.0})
    assert [(row["part"], row["commit"]) for row in table(tmp_path / "cases.csv")] == list(
        zip(("one", "two", "six"), "abc", strict=True)
    )
    log = (tmp_path / "failed.txt").read_text()
    assert (log.count("=== is no case"), log.count("two: a case"), log.count("six: a case")) == (1, 1, 1)
    assert [len(results.table(part)) for part in ("one", "two", "six")] == [1, 1, 1]


def test_suites_that_have_passed_are_not_repeated_at_the_same_commit(tmp_path: Path) -> None:
    for commit, before in (("a", []), ("a", ["one"]), ("b", [])):
        results = Results(tmp_path, META | {"commit": commit})
        results.begin(["correctness"], ["correctness"])
        assert list(results.cases("correctness")) == [row["suite"] for row in results.table("correctness")] == before
        for name, status in (("one", "done"), ("two", "cut off")):
            results.add("correctness", {"suite": name, "passed": 1})
            results.case("correctness", name, status)


def test_tests_are_counted() -> None:
    last = "=== 2 failed, 30 passed, 1 skipped, 3 errors in 5.10s ==="
    assert correctness.counted(f"a PASSED\n{last}\n") == {"passed": 30, "failed": 5, "skipped": 1}
    assert correctness.counted("[gw0] [ 1%] PASSED a\nb FAILED [ 2%]\n") == {"passed": 1, "failed": 1, "skipped": 0}


@pytest.mark.parametrize(("left", "failed", "error"), [(20, 0, supervise.TimeUp), (20, 1, AssertionError)])
def test_a_suite_that_had_less_than_its_time_has_not_failed(
    left: float, failed: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correctness, "run_tests", lambda *_: ({"status": "ended", "failed": failed}, "so far"))
    monkeypatch.setattr(correctness, "seconds_left", lambda: left)
    with pytest.raises(error, match="so far"):
        list(correctness.run("some", correctness.SUITES["exactness"]))


@pytest.mark.slow
def test_a_suite_that_is_ended_has_told_of_the_tests_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os\nimport time\n\n"
        "def test_right(): assert int(os.environ['LOCAL_WORLD_SIZE']) * int(os.environ['OMP_NUM_THREADS']) <= 12\n"
        "def test_wrong(): assert False\ndef test_hangs(): time.sleep(600)\n"
    )
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    (tmp_path / "test_broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.setattr(correctness, "_plugins", lambda workers: [])
    row, text = correctness.run_tests(correctness.Suite([str(tmp_path)]), 40)
    assert (row["status"], row["passed"], row["failed"]) == ("ended", 1, 1)
    assert "test_wrong FAILED" in text


def test_what_a_suite_has_started_ends_with_it() -> None:
    sleep = "import time; time.sleep(600)"
    inner = f"import subprocess, sys; a = subprocess.Popen([sys.executable, '-c', {sleep!r}]); print(a.pid); a.wait()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {inner!r}])"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline()
        correctness.end(process)
        assert process.stdout.read() == ""  # nobody is left who could write


def test_rows_over_the_cap_are_not_measured() -> None:
    model = models.build(QUICK)
    caps = (({"kv_gib": 1e-6}, "full-resident", "device"), ({"kv_gib": 1e-4}, "dynamic", "device"),
            ({"kv_gib": 5e-5}, "scout-quest", "device"), ({"host_gib": 1e-4}, "full-resident", "host"))  # fmt: skip
    for cap, name, where in caps:
        options = dataclasses.replace(QUICK, **cap)
        row = decoding.make_row(options, name, None, 8, 1024)
        with pytest.raises(NotApplicable, match=f"does not fit: .* GiB on the {where}"):
            models.check_room(options, model, row, 2, 1024)
        models.check_room(QUICK, model, row, 2, 1024)


@pytest.mark.parametrize("name", ["scout", "scout-quest", "full-resident"])
def test_a_cache_is_filled_as_estimated_and_grows_no_more(name: str) -> None:
    """A pool that is short of blocks pins a quarter more, which takes seconds and has a graph captured anew."""
    model, block, context = models.build(QUICK), 8, 1024
    tokens = decoding.filled_tokens(context, block)
    assert (tokens + 3) % block == 0  # what closes a block is compiled before steps count
    kv = models.random_kv(QUICK, 2, 16, tokens - models.PROMPT)
    with torch.no_grad():
        cache = models.fill(QUICK, model, decoding.make_row(QUICK, name, None, block, context), 3, kv)
        sizes = []
        for _ in range(2 * block):
            model(input_ids=torch.tensor([[5]] * 3), past_key_values=cache)
            sizes.append([(len(x.store.pool.block_ptr), x.store.table.shape[1]) for x in cache.layers])
    assert sizes == [sizes[0]] * len(sizes)
    told = cache.stats().as_dict()
    if name != "full-resident":
        digest = "quest" if name == "scout-quest" else Scout().digest
        assert told["resident_bytes"] == models.kv_bytes(model.config, 3 * QUICK.budget, 4)
        assert told["digest_bytes"] == pytest.approx(models.digest_bytes(model.config, 3 * context, 8, digest), rel=0.5)


def test_what_tells_most_is_measured_first() -> None:
    found = decoding.chosen_cases(Options())
    assert [(c >> 10, *rest) for c, *rest in found[: len(decoding.FIRST)]] == list(decoding.FIRST)
    assert {replay is None for _, _, row, replay in found if "scout" in row} == {False}


def test_a_script_is_what_is_attended() -> None:
    options = dataclasses.replace(QUICK, budget=512)
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


@pytest.mark.parametrize("text", [decoding.FEW, decoding.MANY, "miss=0.08,drift=0.12,recall=0"])
def test_scripts_drift_and_miss_as_they_are_told(text: str) -> None:
    wanted, steps = parse(text), [1000] * 20 + [1001] * 20
    script = write_script((2, 8), steps, 64, (1, 5), **wanted, device="cpu")
    assert script.miss == pytest.approx(wanted["miss"], abs=0.01)
    assert script.drift == pytest.approx(wanted["drift"], abs=0.02)
    assert script.chosen.shape == (40, 2, 8, 64)
    for blocks in (script.chosen, script.resident):
        assert (blocks.diff(dim=-1) > 0).all()
    assert (script.chosen[..., 0] == 0).all()
    for step, blocks in enumerate(steps):
        assert (script.chosen[step, ..., -5:] == torch.arange(blocks - 5, blocks)).all()
    with pytest.raises(ValueError, match="40 blocks are too few"):
        write_script((2, 8), [40], 32, (1, 5), **wanted, device="cpu")
