"""How fast is the attention of a prompt, beside torch's?

    python eval/prefill.py
    python eval/prefill.py --lengths 2k,8k --shapes 9x3x64 --dtypes bfloat16,float32 --threads 2

Exact causal attention of so many tokens to themselves, of random queries, keys and values; GFLOP/s of the causal half,
and as a share of what a matrix product of the same dtype reaches in the same turns. `torch` is its flash attention for
the CPU, with keys and values repeated for the heads of a group beforehand. Whole prompts: `peers.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer

import common
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


def measure(shape: str, dtype: str, length: int, rounds: int) -> list[dict[str, Any]]:
    """One record a way."""
    heads, kv_heads, dim = map(int, shape.split("x"))
    ways = attention(heads, kv_heads, dim, length, common.DTYPES[dtype])
    work = 2 * heads * dim * length**2  # of the causal half two products; the matrix product has one, of all
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    for _, (way, call) in common.in_turns(list(ways.items()), rounds):
        start = time.perf_counter()
        call()
        seconds[way].append(time.perf_counter() - start)
    spread = {way: common.percentiles(found) for way, found in seconds.items()}
    speed = {way: work / found["p50"] / 1e9 for way, found in spread.items()}
    return [
        {"way": way, "heads": heads, "kv_heads": kv_heads, "dim": dim, "length": length, "dtype": dtype}
        | spread[way]
        | {"gflops": mine, "of_torch": mine / speed["torch"], "of_matmul": mine / speed["matmul"]}
        for way, mine in speed.items()
    ]


def main(
    lengths: Annotated[str, typer.Option(help="Tokens that attend themselves.")] = "2k,8k",
    shapes: Annotated[str, typer.Option(help="Query heads x KV heads x head size.")] = "9x3x64,16x4x128",
    dtypes: Annotated[str, typer.Option(help="Of queries, keys and values.")] = "bfloat16,float16,float32",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way.")] = 5,
    threads: common.ThreadsOption = 0,
    out: common.OutOption = common.RESULTS / "prefill.csv",
) -> None:
    """Time attention to a prompt."""
    torch.set_num_threads(threads or torch.get_num_threads())
    names, sizes = common.listed(dtypes, common.DTYPES, "dtypes"), common.numbers(lengths)
    records: list[dict[str, Any]] = []
    for case in itertools.product(shapes.split(","), names, sizes):
        records += measure(*case, rounds)
    common.write_csv(out, records)
    common.show("attention", records, ("way", "heads", "dim", "length", "dtype", "gflops", "of_torch", "of_matmul"))


if __name__ == "__main__":
    common.command(main)()
