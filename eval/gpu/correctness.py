"""The tests that need a GPU, and the tests of exactness with the model on the GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gpu import supervise
from gpu.models import Options
from gpu.supervise import Cases, Stopped
from hf_offload.cpu.cores import LOCAL_RANKS

ROOT = Path(__file__).parents[2]
DEVICE, DELAY = "HF_OFFLOAD_TEST_DEVICE", "HF_OFFLOAD_DELAY_MS"
# Test by test: a run that is ended in the midst has told of those before. A test that hangs ends its worker.
PYTEST = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--continue-on-collection-errors"]
PYTEST += ["--max-worker-restart=20", "-o", "faulthandler_timeout=80", "-o", "faulthandler_exit_on_timeout=true"]

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
    start, workers = time.monotonic(), min(suite.workers, os.cpu_count() or 1)
    seconds = min(suite.seconds, supervise.deadline - start - 5)
    # Each process has its part of the cores: threads that spin would keep the others from theirs.
    cores = {LOCAL_RANKS: str(workers), "OMP_NUM_THREADS": str((os.cpu_count() or 1) // workers)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*PYTEST, "-n", str(workers), *suite.arguments], cwd=ROOT, stdout=log, stderr=log,
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
    told = "\n".join([*failed, text[-12_000:]])
    if status != "passed":
        cut_off = status == "ended" and seconds < suite.seconds and not row["failed"]
        raise Stopped("cut off" if cut_off else "failed", told)


def counted(text: str) -> dict[str, int]:
    """How many tests passed, failed or could not be collected, and were skipped, by what is said of each at its end."""
    said = set(re.findall(r"^(?:\[gw\d+\] \[.*?\] )?(PASSED|FAILED|ERROR|SKIPPED) (.+?) *(?: - .*)?$", text, re.M))
    found = Counter(word for word, _ in said)
    return {"passed": found["PASSED"], "failed": found["FAILED"] + found["ERROR"], "skipped": found["SKIPPED"]}


def end(process: subprocess.Popen[Any]) -> None:
    """End a process with all that it has started: workers of pytest that hang outlive it, and hold the device."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
