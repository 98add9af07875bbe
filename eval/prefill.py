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
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import DynamicCache, PreTrainedModel

import common
import hf_offload
from hf_offload.blocks.memory import trim_heap
from hf_offload.cpu.kernels.prefill import pieces_of, prefill_attention


def attention(heads: int, kv_heads: int, dim: int, length: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Calls that attend the same tensors, and a matrix product of about as many operations."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(1, count, length, dim, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    out, lse = torch.empty(1, length, heads, dim), torch.empty(heads * length)
    repeated = [x.repeat_interleave(heads // kv_heads, 1) for x in (key, value)]
    one, two = torch.randn(length, length).to(dtype), torch.randn(length, heads * dim).to(dtype)
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

    return {"hf_offload": ours, "torch": flash, "matmul": lambda: one @ two}


def time_attention(shape: tuple[int, int, int], length: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """One record a way."""
    heads, kv_heads, dim = shape
    ways = attention(heads, kv_heads, dim, length, common.DTYPES[dtype])
    work = 2 * heads * dim * length**2  # of the causal half two products; the matrix product has one, of all
    facts = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "length": length, "dtype": dtype}
    records = []
    for way, found in common.time_in_turns({way: lambda call=call: call for way, call in ways.items()}, rounds).items():
        spread = common.percentiles(found)
        records.append({"way": way, **facts, **spread, "gflops": work / spread["p50"] / 1e9})
    _, torchs, product = (record["gflops"] for record in records)
    return [r | {"of_torch": r["gflops"] / torchs, "of_matmul": r["gflops"] / product} for r in records]


def read(model: PreTrainedModel, way: str, ids: torch.Tensor, chunk: int) -> tuple[float, float]:
    """Seconds of a prompt that is read with a cache of its own, and the MiB that it takes at the peak."""
    model.set_attn_implementation("sdpa" if way == "DynamicCache" else "hybrid_sparse")
    cache: Any = DynamicCache(config=model.config) if way == "DynamicCache" else hf_offload.HybridCache(model, "full")
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
    contexts: Annotated[str, typer.Option(help="Lengths of whole prompts; none: no model is loaded.")] = "2k,8k",
    chunks: Annotated[str, typer.Option(help="Tokens of a forward; 0: the whole prompt.")] = "0,1k,4k",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 5,
    *,
    setting: common.TextSetting,
) -> None:
    """Time attention and prompts."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    records: list[dict[str, Any]] = []
    for shape in shapes.split(","):
        heads, kv_heads, dim = map(int, shape.split("x"))
        for dtype in common.listed(dtypes, common.DTYPES, "dtypes"):
            for length in common.numbers(lengths):
                records += time_attention((heads, kv_heads, dim), length, dtype, rounds)
    common.write_csv(setting.out, records)
    common.show("attention", records, ("way", "heads", "dim", "length", "dtype", "gflops", "of_torch", "of_matmul"))
    if not contexts:
        return
    model, tokenizer = setting.load()
    prompts: list[dict[str, Any]] = []
    for context in common.numbers(contexts):
        ids = setting.window(tokenizer, "code", 0, context)
        read(model, "hf_offload", ids[:, :600], 0)  # compiles
        each = [chunk for chunk in common.numbers(chunks) if chunk < context]
        rows = [(way, chunk) for chunk in each for way in ("hf_offload", "DynamicCache")]
        found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for _, row in common.in_turns(rows, max(rounds // 2, 1)):
            found[row].append(read(model, row[0], ids, row[1]))
        for (way, chunk), times in found.items():
            seconds, peaks = zip(*times, strict=True)
            told = {"way": way, "context": context, "chunk": chunk, **common.percentiles(seconds)}
            prompts.append(told | {"peak_mib": statistics.median(peaks)})
    setting.write(prompts, "_prompts")
    common.show("prompts", prompts, ("way", "context", "chunk", "p50", "peak_mib"))


if __name__ == "__main__":
    common.command(main)()
