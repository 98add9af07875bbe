"""Block scores: a digest vector a block, and how the query heads of a group are joined into one score.

Shapes: logmass [B, Hq, N], per query head and block the log of the attention mass that the digest predicts;
score [B, Hkv, N]. Sub-mean digests are in `submeans.py`, the exact mass of the unsealed tail in `tail.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .launch import F32, Array, Launch, check_blocks, group_size, head_tiles, jit, new_ticket, require, tag_of
from .memory import LINE, address_of, get, hold, prefetch, put, take
from .tile import dot_quad, repeat_quad, store_quads
from .vector import choose_less, exp, lane_max, lane_sum, load_f32, splat, store, vmax

_JOINS = {"max": 0, "mean": 1, "raw": 2}
_LOWEST = np.float32(-3.4e38)  # only -inf is smaller
_CHUNK_BLOCKS = 1024  # blocks of a task


@jit
def _score_quad(tag: Any, heads: Any, rows: Any, biases: Any, query: int, width: int, target: int, stride: int) -> None:
    """logmass of 4 blocks for one register tile of heads."""
    dots = dot_quad(tag, heads, rows, query, width)
    low = splat(np.float32(-np.inf))
    store_quads(target, stride, heads, choose_less(biases, splat(_LOWEST), low, dots + biases))


@jit
def vectors_kernel(
    ticket: Array,
    tasks: int,
    full: Any,
    rest: Any,
    query: Array,
    vectors: Array,
    bias: Array,
    table: Array,
    n_blocks: int,
    logmass: Array,
) -> None:
    """One task = one (row, KV head, up to 1024 blocks)."""
    kv_heads, width = vectors.shape[1], vectors.shape[2]
    group = query.shape[1] // kv_heads
    chunks = (n_blocks + _CHUNK_BLOCKS - 1) // _CHUNK_BLOCKS
    row, stride = width * vectors.itemsize, 4 * logmass.shape[2]
    spare = np.empty(4 * group, np.float32)  # the last quad of blocks may reach beyond the end of a row
    while True:
        task = take(ticket)
        if task >= tasks:
            break
        b, h, chunk = task // (chunks * kv_heads), task // chunks % kv_heads, task % chunks
        base = address_of(vectors) + h * row
        begin = chunk * _CHUNK_BLOCKS
        end = min(begin + _CHUNK_BLOCKS, n_blocks)
        queries = address_of(query) + 4 * (b * kv_heads + h) * group * width
        result = address_of(logmass) + (b * kv_heads + h) * group * stride
        for n in range(begin, end, 4):
            p0, p1 = table[b, n], table[b, min(n + 1, end - 1)]
            p2, p3 = table[b, min(n + 2, end - 1)], table[b, min(n + 3, end - 1)]
            for later in range(n + 8, min(n + 12, end)):
                ahead = base + np.int64(table[b, later]) * kv_heads * row
                for line in range(0, row, LINE):
                    prefetch(ahead + line, 1)
            step = kv_heads * row
            rows = (base + p0 * step, base + p1 * step, base + p2 * step, base + p3 * step)
            biases = repeat_quad(bias[p0], bias[p1], bias[p2], bias[p3])
            whole = n + 4 <= end
            target = result + 4 * n if whole else address_of(spare)
            gap = stride if whole else 16
            done = 0
            while done + len(full) <= group:
                place = queries + 4 * done * width
                _score_quad(vectors, full, rows, biases, place, width, target + done * gap, gap)
                done += len(full)
            if done < group:
                place = queries + 4 * done * width
                _score_quad(vectors, rest, rows, biases, place, width, target + done * gap, gap)
            if not whole:
                for head in range(group):
                    for i in range(end - n):
                        put(result + head * stride + 4 * (n + i), get(target + 16 * head + 4 * i))
    hold(spare)


def score_vectors(
    query: Array,
    vectors: Array,
    bias: Array,
    table: Array,
    n_blocks: int,
    logmass: Array,
    *,
    dtype: torch.dtype,
) -> Launch:
    """Prepare logmass[b, h, n] = query[b, h] . vectors[p, h // G] + bias[p] with p = table[b, n].

    This serves block means (W = D) and Quest's minimum and maximum (W = 2 D, the query split into its positive and its
    negative part; Quest, section 3.3).

    Args:
        query: float32 [B, Hq, W], transformed and scaled by the caller; W a multiple of 16.
        vectors: [P, Hkv, W] in `dtype` (bits for 16-bit floats), by physical block.
        bias: float32 [P]; -inf marks a block without valid tokens, whatever its vectors hold.
        table: int32 [B, N], physical block of each logical one.
        n_blocks: blocks 0..n_blocks-1 are scored.
        logmass: float32 [B, Hq, N], written up to n_blocks.
        dtype: torch.float32, float16 or bfloat16.

    Raises:
        ValueError: shapes that contradict each other or a memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, width = query.shape
    physical, kv_heads = vectors.shape[:2]
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    if width % 16 or not width:
        raise ValueError(f"vectors of width {width} are not a multiple of 16; pad them with zeros")
    require("query", query, F32, (batch, query_heads, width))
    require("vectors", vectors, tag_of(dtype).dtype, (physical, kv_heads, width))
    require("bias", bias, F32, (physical,))
    check_blocks(table, logmass, batch, query_heads, n_blocks)
    args = (full, rest, query, vectors, bias, table, int(n_blocks), logmass)
    tasks = batch * kv_heads * -(-n_blocks // _CHUNK_BLOCKS)
    return Launch(vectors_kernel, tasks, args, new_ticket(), batch * n_blocks * kv_heads * width * vectors.itemsize)


@jit
def join_kernel(ticket: Array, tasks: int, logmass: Array, tail: Array, n_blocks: int, score: Array, mode: int) -> None:
    """One task = one (row, KV head)."""
    kv_heads = score.shape[1]
    group = logmass.shape[1] // kv_heads
    padded = (n_blocks + 15) & ~15
    low = splat(np.float32(-np.inf))
    scratch = np.empty(3 * padded + 16, np.float32)
    masses = address_of(scratch)
    best, joined = masses + 4 * padded, masses + 8 * padded  # best: the largest log mass of the group
    while True:
        task = take(ticket)
        if task >= tasks:
            break
        b, h = task // kv_heads, task % kv_heads
        for n in range(0, 4 * padded, 64):
            store(best + n, low)
            store(joined + n, splat(np.float32(0.0)))
        for head in range(h * group, h * group + group):
            scratch[:n_blocks] = logmass[b, head, :n_blocks]
            scratch[n_blocks:padded] = -np.inf
            peak = low
            for n in range(0, 4 * padded, 64):
                x = load_f32(masses + n)
                peak = vmax(peak, x)
                store(best + n, vmax(load_f32(best + n), x))
            if mode == 2:
                share = splat(np.float32(1.0 / group))
                for n in range(0, 4 * padded, 64):
                    store(joined + n, load_f32(joined + n) + load_f32(masses + n) * share)
                continue
            top = max(lane_max(peak), tail[b, head])
            if top == -np.inf:
                continue
            total = splat(np.float32(0.0))
            for n in range(0, 4 * padded, 64):
                x = exp(load_f32(masses + n) - splat(top))
                total = total + x
                store(masses + n, x)
            mass = lane_sum(total) + np.float32(np.exp(tail[b, head] - top))
            share = splat(np.float32(1.0) / (mass if mode == 0 else mass * np.float32(group)))
            for n in range(0, 4 * padded, 64):
                x = load_f32(masses + n) * share
                old = load_f32(joined + n)
                store(joined + n, vmax(old, x) if mode == 0 else old + x)
        for n in range(0, 4 * padded, 64):
            store(joined + n, choose_less(load_f32(best + n), splat(_LOWEST), low, load_f32(joined + n)))
        score[b, h, :n_blocks] = scratch[2 * padded : 2 * padded + n_blocks]
    hold(scratch)


def join_scores(logmass: Array, tail_lse: Array, n_blocks: int, score: Array, *, join: str) -> Launch:
    """Prepare one score a (row, KV head, block) from the log masses of the group's query heads.

    "max" and "mean": each query head's softmax over its blocks and the tail, then the largest or the mean of the group.
    "raw": the mean of the log masses. A block whose log masses are all -inf has score -inf, every other one more.

    Args:
        logmass: float32 [B, Hq, N].
        tail_lse: float32 [B, Hq], natural log of the mass of tokens without a digest; may be -inf.
        n_blocks: blocks 0..n_blocks-1 are joined.
        score: float32 [B, Hkv, N], written up to n_blocks.
        join: "max", "mean" or "raw".

    Raises:
        ValueError: an unknown join, or shapes that contradict each other.
        TypeError: an array of another dtype.
    """
    if join not in _JOINS:
        raise ValueError(f"join {join!r} is not one of {tuple(_JOINS)}")
    batch, query_heads, width = logmass.shape
    kv_heads = score.shape[1]
    group_size(query_heads, kv_heads)
    require("logmass", logmass, F32, (batch, query_heads, width))
    require("tail_lse", tail_lse, F32, (batch, query_heads))
    require("score", score, F32, (batch, kv_heads, score.shape[2]))
    if not 0 <= n_blocks <= min(width, score.shape[2]):
        raise ValueError(f"n_blocks {n_blocks} exceeds logmass {logmass.shape} or score {score.shape}")
    args = (logmass, tail_lse, int(n_blocks), score, _JOINS[join])
    return Launch(join_kernel, batch * kv_heads, args, new_ticket(), 4 * batch * query_heads * n_blocks)
