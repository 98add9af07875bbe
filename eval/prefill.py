"""How fast is a prompt? The attention kernel beside torch's, and whole prompts beside `DynamicCache` with sdpa.

    python eval/prefill.py
    python eval/prefill.py --lengths 2k,8k --shapes 9x3x64 --dtypes bfloat16,float32 --contexts 2k,8k --threads 2

Attention: exact causal attention of so many tokens to themselves, of random queries, keys and values; GFLOP/s of the
causal half, and as a share of what a matrix product of the same dtype reaches in the same turns. `torch` is its flash
attention for the CPU, with keys and values repeated for the heads of a group beforehand. Prompts: seconds of a model's
forward over a text, at once and in chunks (llama.cpp's: `peers.py`); `peak_mib` is what the process had at most beyond
what it began with. All take turns; shown are medians.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from itertools import product
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import common
from hf_offload.blocks.memory import trim_heap
from hf_offload.cpu.kernels.prefill import pieces_of, prefill_attention
from records import show, write_csv

POLICIES = {"hf_offload": "full", "DynamicCache": "dynamic"}


def time_attention(heads: int, kv_heads: int, dim: int, length: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Attention to the same tensors, and a matrix product of about as many operations: one record a way."""
    query, key, value = (torch.randn(1, n, length, dim).to(common.DTYPES[dtype]) for n in (heads, kv_heads, kv_heads))
    out, lse = torch.empty(1, length, heads, dim), torch.empty(heads * length)
    repeated = [x.repeat_interleave(heads // kv_heads, 1) for x in (key, value)]
    one, two = (torch.randn(length, n).to(common.DTYPES[dtype]) for n in (length, heads * dim))
    nothing = np.zeros(1, np.int64), np.zeros((1, 1), np.int32)

    def ours() -> None:
        for first, count in pieces_of(length, 0, heads, dim):
            prefill_attention(
                query[:, :, first : first + count], key, value, *nothing, None, out[:, first : first + count],
                lse[: heads * count].view(1, heads, count), block_size=32, cached=0, fresh_first=0, position=first,
                scale=dim**-0.5, softcap=None, sinks=None,
            ).run()  # fmt: skip

    def flash() -> None:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, *repeated, 0.0, True, scale=dim**-0.5)

    ways = {"hf_offload": lambda: ours, "torch": lambda: flash, "matmul": lambda: lambda: one @ two}
    work = 2 * heads * dim * length**2  # of the causal half two products; the matrix product has one, of all
    facts = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "length": length, "dtype": dtype}
    records = []
    for way, seconds in common.time_in_turns(ways, rounds).items():
        spread = common.percentiles(seconds)
        records.append({"way": way, **facts, **spread, "gflops": work / spread["p50"] / 1e9})
    _, torchs, products = (record["gflops"] for record in records)
    return [r | {"of_torch": r["gflops"] / torchs, "of_matmul": r["gflops"] / products} for r in records]


def read(model: PreTrainedModel, way: str, ids: torch.Tensor, chunk: int) -> tuple[float, float]:
    """Seconds of a prompt that is read with a cache of its own, and the MiB that it takes at the peak."""
    cache = common.Row(way, POLICIES[way]).make_cache(model)
    gc.collect()
    trim_heap()  # what an earlier prompt has left
    before = common.resident_bytes()
    common.forget_peak()
    with torch.inference_mode(), common.clock() as seconds:
        common.prefill(model, cache, ids, chunk or None)
    return seconds[0], (common.peak_bytes() - before) / 2**20


def main(
    lengths: Annotated[str, typer.Option(help="Tokens that attend themselves.")] = "2k,8k",
    shapes: Annotated[str, typer.Option(help="Query heads x KV heads x head size.")] = "9x3x64,16x4x128",
    dtypes: Annotated[str, typer.Option(help="Of queries, keys and values.")] = "bfloat16,float16,float32",
    contexts: Annotated[str, typer.Option(help="Lengths of whole prompts.")] = "2k,8k",
    chunks: Annotated[str, typer.Option(help="Tokens of a forward; 0: the whole prompt.")] = "0,1k,4k",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 5,
    *,
    setting: common.TextSetting,
) -> None:
    """Time attention and prompts."""
    model, tokenizer = setting.load()
    records: list[dict[str, Any]] = []
    kinds = common.listed(dtypes, common.DTYPES, "dtypes")
    for shape, dtype, length in product(shapes.split(","), kinds, common.numbers(lengths)):
        records += time_attention(*map(int, shape.split("x")), length, dtype, rounds)
    write_csv(setting.out, records)
    show("attention", records, ("way", "heads", "dim", "length", "dtype", "gflops", "of_torch", "of_matmul"))
    prompts: list[dict[str, Any]] = []
    for context in common.numbers(contexts):
        ids = setting.window(tokenizer, "code", 0, context)
        read(model, "hf_offload", ids[:, :600], 0)  # compiles
        sizes = [chunk for chunk in common.numbers(chunks) if chunk < context]
        seconds, peaks = defaultdict(list), defaultdict(list)
        rows = list(product(sizes, POLICIES))
        for _, (chunk, way) in common.in_turns(rows, max(rounds // 2, 1)):
            taken, peak = read(model, way, ids, chunk)
            seconds[chunk, way].append(taken)
            peaks[chunk, way].append(peak)
        for chunk, way in rows:
            told = {"way": way, "context": context, "chunk": chunk, **common.percentiles(seconds[chunk, way])}
            prompts.append(told | {"peak_mib": float(np.median(peaks[chunk, way]))})
    setting.write(prompts, "_prompts")
    show("prompts", prompts, ("way", "context", "chunk", "p50", "peak_mib"))


if __name__ == "__main__":
    common.command(main)()
