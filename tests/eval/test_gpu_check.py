"""The GPU check without a GPU: its processes, suites and results, and every part on tiny sizes."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import common
import gpu_check
import records
from gpu import correctness, decoding, supervise
from gpu import model as predicted
from gpu.models import Options
from gpu.operations import OPERATIONS
from gpu.replay import parse, write_script
from gpu.supervise import Results

QUICK = Options("cpu", quick=True, rows="scout")
META = {"commit": "a", "gpu": "none"}


def invoke(*options: str) -> Any:
    return CliRunner().invoke(common.command(gpu_check.main), ["--quick", "--device", "cpu", *options])


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    rows = ["--rows", "dynamic,scout,full-resident,scout-graph"]
    done = invoke("--out", str(tmp_path), *rows, "--minutes", "30")
    assert done.exit_code == 0, done.output
    cases = table(tmp_path / "cases.csv")
    assert {case["part"] for case in cases} == set(gpu_check.PARTS)
    status = {case["case"].split(",")[0]: case["status"] for case in cases}
    assert status["scout-graph"] == status["offloading"] == "not applicable"
    assert set(status.values()) == {"done", "not applicable"}
    assert [row["passed"] for row in table(tmp_path / "correctness.csv")] == ["1"]
    kernels = table(tmp_path / "kernels.csv")
    assert {row["operation"] for row in kernels} >= {"speed: link", *(make.__name__ for make in OPERATIONS)}
    assert all(float(row["of_floor"]) > 0 for row in kernels if row["p50"])
    decoded = {row["row"]: row for row in table(tmp_path / "decode.csv")}
    assert "GPU" in decoded["scout-graph"]["note"]
    assert float(decoded["scout"]["recall_mib_per_step"]) > 0
    with tarfile.open(tmp_path.with_name(f"{tmp_path.name}.tar.gz")) as archive:
        assert {f"./{name}.csv" for name in ("cases", *gpu_check.PARTS)} <= set(archive.getnames())


def test_a_part_that_fails_is_told_and_wrong_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ArithmeticError("the caches do not add up")

    monkeypatch.setattr(decoding, "measure", broken)
    done = invoke("--part", "decode", "--rows", "scout,full-resident", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert {case["status"] for case in table(tmp_path / "cases.csv")} == {"failed"}
    assert "the caches do not add up" in (tmp_path / "failed.txt").read_text()
    for option, value in (("--part", "nonesuch"), ("--rows", "nonesuch")):
        done = invoke(option, value, "--out", str(tmp_path))
        assert (done.exit_code, value in done.output) == (2, True)


def test_a_case_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a failure a new process goes on: the device, or its allocator, may be of no use any more."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(common.__file__).parents[1]}")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    results = Results(tmp_path, META)
    cases = importlib.import_module("_troubled").cases(QUICK)
    supervise.supervise("troubled", cases, results, time.monotonic() + 3000)
    told = {case["case"]: (case["status"], case["note"]) for case in results.found.values()}
    assert told == {
        "first": ("done", ""), "cannot": ("not applicable", "no room"),
        "dies": ("failed", "the process ended with status 9"), "next": ("done", ""),
        "hangs": ("failed", "took too long"),
    }  # fmt: skip
    first, cannot, dies, after, hangs = (case["rows"][0]["process"] for case in results.found.values())
    assert first == cannot == dies != after == hangs


def test_a_later_call_keeps_what_was_told_of_other_parts(tmp_path: Path) -> None:
    for commit, parts, text in (("a", ["one"], "=== is no case"), ("b", ["two", "six"], "two"), ("c", ["six"], "six")):
        results = Results(tmp_path, META | {"commit": commit})
        results.begin(parts, "")
        for part in parts:
            results.note(part, "a case", "failed", [{"x": 1.0}], note=text)
            results.write(part)
    assert [(row["part"], row["commit"]) for row in table(tmp_path / "cases.csv")] == list(
        zip(("one", "two", "six"), "abc", strict=True)
    )
    log = (tmp_path / "failed.txt").read_text()
    assert (log.count("=== is no case"), log.count("two: a case"), log.count("six: a case")) == (1, 1, 1)
    assert [len(table(tmp_path / f"{part}.csv")) for part in ("one", "two", "six")] == [1, 1, 1]


def test_what_a_suite_has_started_ends_with_it() -> None:
    inner = "import subprocess; a = subprocess.Popen(['sleep', '600']); print(a.pid); a.wait()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-Ssuc', {inner!r}])"
    process = subprocess.Popen(
        [sys.executable, "-Ssc", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline()
        correctness.end(process)
        assert process.stdout.read() == ""  # nobody is left who could write


def test_scripts_drift_and_miss_as_they_are_told() -> None:
    wanted, steps = parse(decoding.FEW), [1000] * 20 + [1001] * 20
    script = write_script((2, 8), steps, 64, (1, 5), **wanted, device="cpu")
    assert script.miss == pytest.approx(wanted["miss"], abs=0.01)
    assert script.drift == pytest.approx(wanted["drift"], abs=0.02)
    for step, blocks in enumerate(steps):
        assert (script.chosen[step, ..., -5:] == torch.arange(blocks - 5, blocks)).all()


def test_tests_are_counted_as_they_end() -> None:
    """Each once, in a run that was cut off, too: no line at its end sums up."""
    told = """
test_x.py::test_a[b c]
[gw0] [ 10%] PASSED test_x.py::test_a[b c]
[gw0] [ 20%] PASSED test_x.py::test_a[b d]
[gw1] [ 30%] SKIPPED test_x.py::test_s
[gw0] [ 40%] FAILED test_x.py::test_f
[gw0] node down: Not properly terminated
[gw0] [ 50%] ERROR test_x.py::test_e
FAILED test_x.py::test_f - AssertionError: why
ERROR test_y.py - ImportError while importing
"""
    assert correctness.counted(told) == {"passed": 2, "failed": 3, "skipped": 1}


def test_the_predicted_steps_are_near_those_that_were_measured(tmp_path: Path) -> None:
    """Of an H200, by an H100's speeds."""
    arguments = ["--out", str(tmp_path / "model.csv"), "--measured", str(records.RESULTS / "h200")]
    done = CliRunner().invoke(common.command(predicted.main), arguments)
    assert done.exit_code == 0, done.output
    ratios = [float(row["ratio"]) for row in table(tmp_path / "model.csv") if row["measured"]]
    assert len(ratios) == 8
    assert all(0.75 < ratio < 1.15 for ratio in ratios)
