"""Products of a few rows with a weight matrix, y = x Wᵀ + b, at the speed at which memory gives the weights.

A task is a run of rows of W, read one after the other: a core's prefetcher follows one long stream better than several.
The rows of x are widened once, and each vector of W serves up to four of them. A sum has the same order whatever the
number of rows and threads: a row's result is the same alone and among others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from hf_offload.cpu.launch import TAGS, Array, Launch, jit, kernel, tag_of
from hf_offload.cpu.memory import LINE, address_of, copy_bytes, count_up, hold, next_task, prefetch
from hf_offload.cpu.simd.convert import put_rounded
from hf_offload.cpu.simd.matrix_tiles import add, has_feature
from hf_offload.cpu.simd.register_tiles import load_tile, outer_fma, store_tile, zeros
from hf_offload.cpu.simd.vectors import (
    FLOATS,
    VECTOR,
    WORDS,
    emit_widen,
    load,
    lowered,
    pointer,
    run_totals,
    splat,
    store,
    uniform,
    word_constant,
)

MOST_ROWS = 8
"""Rows of x, at most."""

_TASK_BYTES = 1 << 18  # of weights, about
_AHEAD = 2048  # bytes; a core that is busy with several rows of x prefetches too late by itself
_TOTALS = (0,) * 16  # rows of W whose sums are folded together; see `run_totals`
_TILES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))  # the length is the number of rows

# The crossing: from how many rows on, and for several rows up to how many entries of x, the kernel is at least as fast
# as torch, by dtype and whether there is AVX-512 (`eval/results/bench_cpu_linear.csv`). Missing: always.
#
# torch reads the weights fast for one row in float16, and in bfloat16 where it does not hand them to oneDNN. Of several
# rows oneDNN is fast in bfloat16, and this kernel is slowed by a widened x that leaves the first-level cache.
_CROSSING = {
    (torch.bfloat16, True): (1, 4096),
    (torch.bfloat16, False): (2, None),
    (torch.float16, True): (2, None),
    (torch.float16, False): (2, None),
}


@lowered
def load_pair(typing: Any, tag: Any, address: Any) -> Any:
    """32 stored entries as two vectors: the first 16 and the others; of bfloat16, which is faster, even and odd."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if tag.dtype == types.uint16:
            words = builder.load(pointer(builder, args[1], WORDS), align=2)
            halves = builder.shl(words, word_constant(16)), builder.and_(words, word_constant(0xFFFF0000))
            vectors = [builder.bitcast(half, FLOATS) for half in halves]
        else:
            second = builder.add(args[1], ir.Constant(args[1].type, 2 * tag.dtype.bitwidth))
            vectors = [emit_widen(context, builder, tag.dtype, row) for row in (args[1], second)]
        return context.make_tuple(builder, uniform(VECTOR, 2), vectors)

    return uniform(VECTOR, 2)(tag, types.int64), emit


@jit
def copy_end(tag: Any, address: int, count: int, spare: int) -> None:
    """Copy `count` of up to 32 stored entries to `spare`, 128 bytes, and write 0 behind them."""
    store(spare, splat(np.float32(0.0)))
    store(spare + 64, splat(np.float32(0.0)))
    copy_bytes(spare, address, count * tag.itemsize)


@jit
def dot_rows(tag: Any, tile: Any, weight: int, x: int, x_step: int, dim: int, spare: int) -> Any:
    """Products of a stored row with m float32 rows: a tile of m vectors, whose lanes add up to them.

    Args:
        tag, tile: of the dtype of the stored row, and of m.
        weight, x: addresses; x holds what `load_pair` makes of rows padded with zeros, `x_step` bytes apart.
        dim: entries of a row.
        spare: address of a buffer of 128 bytes.
    """
    size = tag.itemsize
    a, b, c, d = zeros(tile, 1), zeros(tile, 1), zeros(tile, 1), zeros(tile, 1)
    for i in range(0, dim & ~63, 64):
        here, column = weight + i * size, x + 4 * i
        if len(tile) > 2:
            for line in range(0, 64 * size, LINE):
                prefetch(here + _AHEAD + line, 1)
        one, two = load_pair(tag, here), load_pair(tag, here + 32 * size)
        a = outer_fma(a, one[:1], load_tile(column, x_step, tile, 1))
        b = outer_fma(b, one[1:], load_tile(column + 64, x_step, tile, 1))
        c = outer_fma(c, two[:1], load_tile(column + 128, x_step, tile, 1))
        d = outer_fma(d, two[1:], load_tile(column + 192, x_step, tile, 1))
    for i in range(dim & ~63, dim, 32):
        here, column = weight + i * size, x + 4 * i
        if dim - i < 32:
            copy_end(tag, here, dim - i, spare)
            here = spare
        one = load_pair(tag, here)
        a = outer_fma(a, one[:1], load_tile(column, x_step, tile, 1))
        b = outer_fma(b, one[1:], load_tile(column + 64, x_step, tile, 1))
    return add(add(a, b), add(c, d))


@kernel
def linear_kernel(
    ticket: Array, tasks: int, tag: Any, tile: Any, x: int, x_rows: int, weight: int, step: int, bias: int, rows: int,
    dim: int, each: int, out: int,
) -> None:  # fmt: skip
    """One task = `each` rows of W, `step` bytes apart. x `[x_rows, dim]`, bias (0: none), out `[x_rows, rows]`."""
    size, high = tag.itemsize, len(tile)
    padded = (x_rows + high - 1) // high * high
    x_step = 4 * ((dim + 31) & ~31)
    scratch = np.zeros((padded * (x_step + 1024) + 128 + 64) // 4 + 16, np.float32)
    wide = (address_of(scratch) + 63) & ~63
    sums = wide + padded * x_step
    spare = sums + padded * 1024
    totals = scratch[len(scratch) - 16 :]
    for r in range(x_rows):
        for i in range(0, dim, 32):
            here, target = x + (r * dim + i) * size, wide + r * x_step + 4 * i
            if dim - i < 32:
                copy_end(tag, here, dim - i, spare)
                here = spare
            pair = load_pair(tag, here)
            store(target, pair[0])
            store(target + 64, pair[1])
    task = count_up(ticket, 0)
    while task < tasks:
        last = min((task + 1) * each, rows)
        for first in range(task * each, last, 16):
            count = min(16, last - first)
            for i in range(count):
                row = weight + (first + i) * step
                for r in range(0, padded, high):
                    dots = dot_rows(tag, tile, row, wide + r * x_step, x_step, dim, spare)
                    store_tile(sums + 1024 * r + 64 * i, 1024, tile, dots)
            more = splat(np.float32(0.0))
            if bias != 0:
                copy_end(tag, bias + first * size, count, spare)
                more = load(tag, spare)
            for r in range(x_rows):
                store(address_of(totals), run_totals(sums + 1024 * r, _TOTALS) + more)
                for i in range(count):
                    put_rounded(tag, out + (r * rows + first + i) * size, totals[i])
        task = next_task(ticket)
    hold(scratch)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, threads: int = 1
) -> Launch:
    """Prepare out = x Wᵀ + b: sums in float32, rounded once.

    Args:
        x: `[n, K]`, contiguous; n from 1 to 8.
        weight: `[N, K]`, rows contiguous; neither N nor K is 0.
        bias: `[N]`, contiguous, or None.
        out: `[n, N]`, contiguous, written. All four are CPU tensors of one dtype: float32, float16 or bfloat16.
        threads: threads that will run the launch; it divides the work.

    Raises:
        ValueError: shapes or strides that the kernel does not cover.
        TypeError: another dtype or device.
    """
    rows, dim = weight.shape
    given = (x, weight, out) if bias is None else (x, weight, out, bias)
    tag, size = tag_of(weight.dtype), weight.element_size()
    if any(each.dtype != weight.dtype or each.device.type != "cpu" for each in given):
        raise TypeError(f"dtypes or devices differ: {[(each.dtype, each.device.type) for each in given]}")
    if x.ndim != 2 or not 1 <= len(x) <= MOST_ROWS or not rows or not dim or threads < 1:
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} or threads={threads} are not covered")
    if x.shape[1] != dim or out.shape != (len(x), rows) or (bias is not None and bias.shape != (rows,)):
        raise ValueError(f"shapes {[list(each.shape) for each in given]} of x, weight, out (and bias) do not fit")
    if weight.stride(1) != 1 or not all(each.is_contiguous() for each in given if each is not weight):
        raise ValueError("x, out, bias and the rows of weight must be contiguous; pass a contiguous copy")
    tasks = threads * -(-weight.numel() * size // (threads * _TASK_BYTES))
    each = -(-rows // (16 * tasks)) * 16
    tiles = -(-len(x) // 4)
    args = (
        tag, _TILES[-(-len(x) // tiles)], x.data_ptr(), len(x), weight.data_ptr(), weight.stride(0) * size,
        0 if bias is None else bias.data_ptr(), rows, dim, each, out.data_ptr(),
    )  # fmt: skip
    return Launch(linear_kernel, -(-rows // each), args, weight.numel() * size, keep=given, label="a product")


_AVX512 = has_feature("avx512f")
_VECTORS = has_feature("avx2") and has_feature("fma") and has_feature("f16c")


def faster_than_torch(dtype: torch.dtype, rows: int, dim: int) -> bool:
    """Whether the kernel multiplies `rows` rows of `dim` entries at least as fast as torch, on this processor.

    False without AVX2.
    """
    if dtype not in TAGS or not _VECTORS or rows > MOST_ROWS:
        return False
    least, most = _CROSSING.get((dtype, _AVX512), (1, None))
    return rows >= least and (rows == 1 or most is None or rows * dim <= most)
