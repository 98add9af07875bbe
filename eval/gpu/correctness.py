"""The tests that need a GPU, and the tests of exactness with the model on the GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu.options import Options
from gpu.supervise import Cases, TimeUp, seconds_left
from hf_offload.cpu.cores import LOCAL_RANKS

ROOT = Path(__file__).parents[2]
DEVICE, DELAY = "HF_OFFLOAD_TEST_DEVICE", "HF_OFFLOAD_DELAY_MS"
TEST_SECONDS = 90
LOG_CHARACTERS = 12_000

GRAPHS = ["tests/graph/test_replays.py", "tests/gpu/test_graph_cuda.py"]
FLAGS = "tests/gpu/test_handover.py"
MODELS = [f"tests/test_{name}.py" for name in ("families", "int8", "hybrid_cache", "faults")]
ON_GPU = ["-m", "not slow and not gpu"]
ELSEWHERE = [f"--ignore={path}" for path in ("tests/eval", *GRAPHS, FLAGS)]
"""Nothing in tests/eval is marked `gpu`, and a module that lacks a package of evaluations would stop a whole run."""
FAULTS = "nobody_wrote or names_the_purpose or hangs or (nth_fault and split and not torch_operations)"
NOT_ON_GPU = f"not copies_of_a_model and (not test_faults or {FAULTS})"
"""The others of test_faults.py break what only models on the CPU call."""


class Suite(NamedTuple):
    """Some tests: arguments for pytest, what is added to the environment, and the seconds that they may take.

    `workers` is the number of processes at once: kernels that wait for a flag keep those of others from the device.
    """

    arguments: list[str]
    environment: dict[str, str] = {}  # noqa: RUF012 - nobody writes into it
    seconds: float = 240
    workers: int = 4


SUITES = {  # those that tell most first
    "flags": Suite([FLAGS, "-m", "gpu"], seconds=60, workers=1),
    "a first graph": Suite([GRAPHS[0], "-m", "gpu", "-k", "scout-attend and llama"], seconds=90, workers=1),
    "graphs against eager steps": Suite([*GRAPHS, "-m", "gpu"], workers=1),
    "kernels against their references": Suite(["tests", *ELSEWHERE, "-m", "gpu"], workers=8),
    "exactness": Suite(["tests/test_exactness.py", *ON_GPU], {DEVICE: "cuda"}, workers=8),
    "exactness, every hand-over late": Suite(["tests/test_exactness.py", *ON_GPU], {DEVICE: "cuda", DELAY: "2"}),
    "caches and models": Suite([*MODELS, *ON_GPU, "-k", NOT_ON_GPU], {DEVICE: "cuda"}),
    "torch forms, compiling": Suite(["tests/gpu", *ON_GPU]),
}
QUICK = {"a quick test": Suite(["tests/gpu/test_operations.py", "-k", "splits_fill"], workers=1)}


def cases(options: Options) -> Cases:
    """A case a suite."""
    suites = QUICK if options.quick else SUITES
    return {name: (suite.seconds + 10, partial(run, name, suite)) for name, suite in suites.items()}


def run(name: str, suite: Suite) -> Iterator[dict[str, Any]]:
    """Run a suite in the time that is left: what it counted; what it printed last and what failed goes into the log."""
    seconds = min(suite.seconds, seconds_left() - 5)
    workers = min(suite.workers, os.cpu_count() or 1) if importlib.util.find_spec("xdist") is not None else 1
    # Test by test: a run that is ended in the midst has told of those before.
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rfE", "--continue-on-collection-errors"]
    # Each process has its part of the cores: threads that spin would keep the others from theirs.
    cores = {LOCAL_RANKS: str(workers), "OMP_NUM_THREADS": str((os.cpu_count() or 1) // workers)}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, *_plugins(workers), *suite.arguments], cwd=ROOT, stdout=log, stderr=log,
            env={**os.environ, **cores, **suite.environment}, start_new_session=True,
        )  # fmt: skip
        try:
            status = "failed" if process.wait(seconds) else "passed"
        except subprocess.TimeoutExpired:
            status = "ended"
        finally:
            end(process)
        log.seek(0)
        text = log.read()
    row = {"suite": name, "status": status, **counted(text), "seconds": time.monotonic() - start}
    yield row
    failed = [line for line in text.splitlines() if re.search(r"\b(FAILED|ERROR)\b", line)]
    told = "\n".join([*failed, text[-LOG_CHARACTERS:]])
    if status == "ended" and seconds < suite.seconds and not row["failed"]:
        raise TimeUp(told)
    if status != "passed":
        raise AssertionError(told)


def counted(text: str) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by pytest's last line; of a run that was ended, by its words."""
    last = text.strip().rpartition("\n")[2]
    found = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not found:
        return {kind: len(re.findall(rf"\b{kind.upper()}\b", text)) for kind in ("passed", "failed", "skipped")}
    failed = found.get("failed", 0) + found.get("error", 0)
    return {"passed": found.get("passed", 0), "failed": failed, "skipped": found.get("skipped", 0)}


def end(process: subprocess.Popen[Any]) -> None:
    """End a process with all that it has started: workers of pytest that hang outlive it, and hold the device."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _plugins(workers: int) -> list[str]:
    """Several tests at once, and an end for those that hang, where pytest has the plugins for it."""
    found = ["-o", f"faulthandler_timeout={TEST_SECONDS - 10}"]
    if workers > 1:
        found += ["-n", str(workers), "--max-worker-restart=20"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        found += [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    return found
