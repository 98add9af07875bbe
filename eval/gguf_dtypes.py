"""A GGUF file on a CPU: how long do a prompt and a token take, by dtype, with stock layers and with `fast_linear`?

    python eval/gguf_dtypes.py
    python eval/gguf_dtypes.py --model qwen2.5-0.5b-instruct-q4_k_m.gguf

The first row is what `from_pretrained(folder, gguf_file=…)` makes without further arguments; in the others the weights
are unpacked into a dtype. Each prompt is read by a new `HybridCache(model, "scout")`. All rows take turns.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import common
import hf_offload
from hf_offload.tools.assets import source_of
from records import RESULTS, show, write_csv

WARM_UP = 2


def models_of(name: str | None) -> dict[str, PreTrainedModel]:
    """A model for each way to load the file."""
    source, packed = source_of(name)
    if not packed:
        raise typer.BadParameter(f"--model {name}: not a GGUF file")
    stock = AutoModelForCausalLM.from_pretrained(source, **packed, attn_implementation="hybrid_sparse")
    made = {"as Transformers loads it": stock.eval()}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        unpacked, _ = hf_offload.load_demo_model(name, attn_implementation="hybrid_sparse", dtype=dtype, device="cpu")
        made[f"unpacked, {str(dtype).removeprefix('torch.')}"] = unpacked
    return made


def main(
    model: Annotated[str | None, typer.Option(help="A GGUF file or a folder with one [default: SmolLM2].")] = None,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of the prompt.")] = 512,
    steps: common.StepsOption = 16,
    rounds: common.RoundsOption = 6,
    threads: common.ThreadsOption = 0,
    out: common.OutOption = RESULTS / "gguf_dtypes.csv",
) -> None:
    """Measure the ways to load a GGUF file for a CPU."""
    if threads:
        torch.set_num_threads(threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    source, packed = source_of(model)
    tokenizer = AutoTokenizer.from_pretrained(source, **packed)
    ids = common.window(hf_offload.demo_text("documentation"), tokenizer, 0, prompt + WARM_UP + steps)
    rows = [(way, made, fast) for way, made in models_of(model).items() for fast in (False, True)]
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    tokens: dict[tuple[str, bool], list[float]] = defaultdict(list)
    with torch.inference_mode():
        for turn, (way, made, fast) in common.in_turns(rows, rounds + 1):
            handle = hf_offload.fast_linear(made) if fast else None
            cache = hf_offload.HybridCache(made, "scout")
            with common.clock() as taken:
                common.prefill(made, cache, ids[:, :prompt])
            found = common.decode(made, cache, ids[:, prompt:])[0][WARM_UP:]
            if handle is not None:
                handle.close()
            if turn:  # kernels are compiled in the first
                seconds[way, fast].append(taken[0])
                tokens[way, fast] += found
    records: list[dict[str, Any]] = [
        {"way": way, "layers": "fast_linear" if fast else "stock", "dtype": str(made.dtype).removeprefix("torch.")}
        | {"prompt": prompt, "prompt_s": common.percentiles(seconds[way, fast])["p50"]}
        | common.percentiles(tokens[way, fast])
        for way, made, fast in rows
    ]
    write_csv(out, records)
    show(f"{prompt} tokens: seconds; ms a token", records, ("way", "layers", "dtype", "prompt_s", "p20", "p50", "p80"))


if __name__ == "__main__":
    common.command(main)()
