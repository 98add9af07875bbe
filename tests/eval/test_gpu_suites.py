"""Reports of the GPU check on its test suites, and results kept from earlier calls."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu import correctness
from gpu.options import Options
from gpu.results import Results
from gpu.supervise import Listener, Report

QUICK = Options("cpu", quick=True)


def test_a_later_call_keeps_what_was_told_of_other_parts(tmp_path: Path) -> None:
    for parts, text in (
        (["correctness"], "one\n=== is not equal to\n"),
        (["kernels", "decode"], "two"),
        (["decode"], "three"),
    ):
        results = Results(tmp_path, parts[0], parts)
        for part in parts:
            results.add("cases", {"part": part, "case": "a case", "status": "failed"})
            results.failed(part, "a case", text)
    found = [(row["part"], row["commit"]) for row in csv.DictReader((tmp_path / "cases.csv").read_text().splitlines())]
    assert found == [("correctness", "correctness"), ("kernels", "kernels"), ("decode", "decode")]
    log = (tmp_path / "failed.txt").read_text()
    assert [text in log for text in ("correctness: a case", "one", "kernels: a case", "three")] == [True] * 4
    assert (log.count("two"), log.count("=== decode")) == (1, 1)


@pytest.mark.parametrize(("seconds", "failed", "status"), [(20, 0, "cut off"), (20, 1, "failed"), (1000, 0, "failed")])
def test_a_suite_that_had_less_than_its_time_has_not_failed(
    seconds: float, failed: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"status": "ended", "failed": failed}
    monkeypatch.setattr(correctness, "run_tests", lambda *arguments: (row, "so far"))
    ends: list[tuple[str, str, str, float]] = []
    names = correctness.names(QUICK)
    listener = Listener(names, lambda row: None, lambda *end: ends.append(end))
    correctness.run(QUICK, tuple(names), Report(listener.take, time.monotonic() + seconds))
    assert [end[1] for end in ends] == [status]
    assert "so far" in ends[0][2]


def test_suites_that_have_passed_are_not_repeated_at_the_same_commit(tmp_path: Path) -> None:
    """And what is left is told of: a check that did not get to all tests has not passed."""
    cases = {"one": "done", "two": "cut off", "three": "failed"}
    for commit, left in (("a", ["one", "two", "three"]), ("a", ["two", "three"]), ("b", ["one", "two", "three"])):
        results = Results(tmp_path, commit, ["correctness"], ["correctness"])
        assert [name for name in cases if ("correctness", name) not in results.done] == left
        for name in left:
            results.add("correctness", {"suite": name, "passed": 1})
            results.add("cases", {"part": "correctness", "case": name, "status": cases[name]})
        assert not results.complete("correctness")
        assert [row["suite"] for row in results.table("correctness")] == list(cases)
    results = Results(tmp_path, "c", ["correctness"], ["correctness"])
    results.add("cases", {"part": "correctness", "case": "one", "status": "done"})
    assert results.complete("correctness")


def test_no_suite_of_marked_tests_needs_what_evaluations_need() -> None:
    """A module that cannot be imported would end the run before its first test."""
    arguments = correctness.SUITES["kernels against their references"].arguments
    assert "--ignore=tests/eval" in arguments
    others = [path for path in Path(__file__).parent.rglob("test_*.py") if path != Path(__file__)]
    assert len(others) > 15
    assert not [path for path in others if "mark.gpu" in path.read_text(encoding="utf-8")]


@pytest.mark.slow
def test_no_suite_breaks_what_only_models_on_the_cpu_call() -> None:
    """It would wait for a fault that never comes."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/test_faults.py"]
    command += ["-m", "", "-k", correctness.NOT_ON_GPU]  # on a device all are quick
    told = subprocess.run(command, cwd=correctness.ROOT, capture_output=True, text=True, check=True).stdout
    assert "BlockHostPartial-_launches" in told
    assert not [name for name in ("LaunchSequence-run", "copy_records") if name in told]


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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not tell who started whom")
def test_what_a_suite_has_started_ends_with_it() -> None:
    sleep = "import time; time.sleep(600)"
    inner = f"import subprocess, sys; a = subprocess.Popen([sys.executable, '-c', {sleep!r}]); print(a.pid); a.wait()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        last = Path("/proc", process.stdout.readline().strip(), "stat")
        assert last.exists()
        correctness.end(process)
        assert process.returncode == -signal.SIGKILL
        assert process.stdout.read() == ""  # nobody is left who could write
    for _ in range(30_000):
        if not last.exists() or last.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.01)
    else:
        pytest.fail("what the suite had started goes on")
