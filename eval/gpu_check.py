"""Everything that only a GPU can show: correctness, times of kernels, the hand-over to the CPU, decoding.

    make gpu-check
    python eval/gpu_check.py --part kernels --out results --minutes 5
    python eval/gpu_check.py --part decode --contexts 32k --batches 1,4 --rows scout-graph,dynamic

Parts, each in a process of its own: a case that fails, crashes or hangs is noted and the others go on.

- correctness: the tests of flags and of one graph; graphs against eager steps; the others marked `gpu`; the tests of
  exactness with the model on the GPU, once more with every hand-over late. Of a row, `failed` should be 0.
- decode: a model of random weights in the shape of Qwen3-8B, on random keys and values; milliseconds a step, tokens a
  second. `full-resident` has all of the context on the device and hands nothing over, `default` is a cache as it is by
  default, `chosen` the same with `dense=False`, `drawn` draws keys, `dynamic` and `offloading` are Transformers' own
  cache on the device and on the host. The blocks of `scout` and of what is left out of it follow a script
  (`eval/gpu/replay.py`), since those of a random model change nearly all in each step; the column `replay` says which:
  10 % of the blocks are not resident and a recall comes every 4 steps, or 20 % and every step.
- prompt: seconds until the first token behind a prompt of random tokens, a new cache each time: `first` with memory
  that nobody has had yet, `second` after that.
- handoff: query and blocks to the host, the CPU's work, the wait for it: microseconds a layer. The aim is 15 for a work
  that is nothing.
- kernels: the speeds of copies and of pinning ordinary and huge pages; the larger operations of `hf_offload.gpu`, in
  microseconds: p20, p50 and p80 of the time on the device with cold caches; the time that its bytes alone would take
  (`floor`: at the speed of a large copy, measured in the same run) and their ratio; what a launch costs the host; the
  time within a CUDA graph. Of `add_one`, `in_graph` is what one more small kernel costs a step.

At the end `model.csv` sets what was measured of decoding beside what `eval/gpu/model.py` says from the pieces.

Results are on disk as they come, in `cases.jsonl`. Behind each part they are written as `<part>.csv`, `cases.csv` (what
became of every case, also of those that there was no time for), `failed.txt` (why), and all of it once more as an
archive, `<out>.tar.gz`. A first call gets to what tells most; `--part correctness --out results` and `--part decode
--out results` get to the rest. What has passed of the tests is not repeated by a later call at the same commit, on the
same device, into the same folder. The exit status is 1 if anything failed, and 75 if nothing did but not all tests were
run: call again. (`make` makes 2 of both.) Memory errors: `compute-sanitizer --tool memcheck python -m pytest -x -q -m
gpu tests/gpu`.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from common import command, listed
from gpu import correctness, decoding, handoff, model, operations
from gpu.models import Options
from gpu.supervise import Results, here, supervise
from records import RESULTS, environment, show

PARTS = {  # its cases, and seconds of each, if there are nine minutes
    "correctness": (correctness.cases, 230),
    "decode": (decoding.cases, 250),
    "prompt": (decoding.prompts, 30),
    "handoff": (handoff.cases, 10),
    "kernels": (operations.cases, 40),
}
LASTING = "correctness"
UNFINISHED = 75  # exit status


def main(
    part: Annotated[str, typer.Option(help=f"{', '.join(PARTS)} or all; several, comma-separated.")] = "all",
    results: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = RESULTS / "gpu",
    minutes: Annotated[float, typer.Option(min=0.1, help="Stop before so many are over.")] = 9.0,
    commit: Annotated[str | None, typer.Option(help="The commit, where the sources are no git checkout.")] = None,
    *,
    options: Options,
) -> None:
    """Check and measure on a GPU."""
    started = time.monotonic()
    wanted = list(PARTS) if part == "all" else listed(part, PARTS, "--part")
    cases = {name: PARTS[name][0](options) for name in wanted}
    if options.on_gpu and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {options.device}: torch finds no CUDA device here; cpu tries the script")
    out = Results(results, environment() | ({} if commit is None else {"commit": commit}))
    out.begin([*wanted, "model"], LASTING)
    run = here if options.quick else supervise
    for place, name in enumerate(wanted):
        now, share = time.monotonic(), PARTS[name][1] / sum(PARTS[other][1] for other in wanted[place:])
        try:
            run(name, cases[name], out, now + (started + 60 * minutes - 5 - now) * share)
            for case in cases[name].keys() - out.cases(name).keys():
                out.note(name, case, "not done")
        finally:
            out.write(name)
        if rows := [row for case in out.cases(name).values() for row in case["rows"]]:
            show(name, rows, decoding.SHOWN if name == "decode" else None)
    if options.on_gpu:  # what a CPU takes says nothing of a model of GPUs
        predicted = model.check(results)
        out.note("model", "steps", "done", predicted)
        out.write("model")
        show("milliseconds a step", predicted, model.SHOWN)
    told = {(name, case["status"]) for name in wanted for case in out.cases(name).values()}
    print(f"results are in {results}; {time.monotonic() - started:.0f} s", flush=True)
    if any(status == "failed" for _, status in told):
        raise typer.Exit(1)
    if any(name == LASTING and status != "done" for name, status in told):
        raise typer.Exit(UNFINISHED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    command(main)()
