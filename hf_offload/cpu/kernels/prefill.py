"""Exact attention of many queries: a prompt, a chunk of one or a turn, to the cached blocks and to itself.

A task is some queries of one row, with all query heads of one KV head: query i and head g of the group are query row
i · G + g. It goes through the keys in tiles of `TILE`. A tile's keys and values are packed once, from where they lie,
and serve all query rows of the task, twelve at a time: scores, a step of online softmax, weighted values.

Both products are one microkernel, C += A · B, on register tiles of twelve rows by 32 columns. With AVX512_BF16 and
bfloat16, A and B hold pairs: two channels of a key, two tokens' values, two weights. Otherwise they are float32.
Everything between the two products stays in the first-level cache: twelve rows of scores and of weights.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from llvmlite import binding

from hf_offload.cpu.launch import BLOCK_SIZES, F32, I32, I64, TAGS, U8, Array, Launch, jit, kernel, require, tag_of
from hf_offload.cpu.memory import address_of, copy_bytes, count_up, get, hold, next_task, put
from hf_offload.cpu.simd.matrix_tiles import (
    add,
    add_faded,
    has_feature,
    interleave,
    lane_numbers,
    outer_dot,
    store_pairs,
    transpose,
)
from hf_offload.cpu.simd.register_tiles import load_columns, load_tile, outer_fma, spread, store_tile, zeros
from hf_offload.cpu.simd.vectors import (
    NOTHING,
    bend,
    choose_less,
    exp2,
    exp2_rough,
    fma,
    lane_max,
    load,
    load_f32,
    run_totals,
    splat,
    store,
    vmax,
)

from .move_records import layout_of

TILE = 256  # keys that are packed at a time
ROWS = 288  # most query rows of a task: their sums take 144 KiB at a head dimension of 128
LEAST = 16  # queries of a launch at least: each launch packs the keys again
SUMMED = 128  # products that are added up one after the other: partial sums of longer rows round less
_HEIGHT = (0,) * 12  # rows of a register tile
_TALL = len(_HEIGHT)
_RUNS = (0,) * 16  # see `run_totals`
_FLOAT = TAGS[torch.float32]
_LOG2_E = math.log2(math.e)
_LAUNCH_OPERATIONS = 1e11  # of a launch at most, half a second: between two launches a prompt can be interrupted


# --- packing ---------------------------------------------------------------------------------------------------------


@jit
def pack_keys(tag: Any, pairs: Any, rows: Array, keys: int, dim: int, target: int) -> None:
    """Write keys as columns: `[dim / 2, TILE]` pairs of channels, or `[dim, TILE]` float32."""
    for token in range(0, keys, 16):
        first, to = address_of(rows) + 8 * token, target + 4 * token
        if pairs is None:
            for d in range(0, dim, 16):
                transpose(tag, first, d * tag.itemsize, to + 4 * TILE * d, 4 * TILE, 16)
        else:
            for d in range(0, dim & ~31, 32):
                transpose(_FLOAT, first, 2 * d, to + 2 * TILE * d, 4 * TILE, 16)
            if dim & 31:
                d = dim & ~31
                transpose(_FLOAT, first, 2 * d, to + 2 * TILE * d, 4 * TILE, 8)


@jit
def pack_values(tag: Any, pairs: Any, rows: Array, keys: int, dim: int, target: int) -> None:
    """Write values as rows: `[keys / 2, dim]` pairs of tokens, or `[keys, dim]` float32."""
    if pairs is None:
        for token in range(keys):
            for d in range(0, dim, 16):
                store(target + 4 * (token * dim + d), load(tag, rows[token] + d * tag.itemsize))
    else:
        for token in range(0, keys, 2):
            for d in range(0, dim, 16):
                interleave(rows[token] + 2 * d, rows[token + 1] + 2 * d, target + 2 * token * dim + 4 * d)


# --- the microkernel -------------------------------------------------------------------------------------------------


def _multiplier(columns: int) -> Any:
    """The microkernel for register tiles of twelve rows by a number of vectors."""

    @jit
    def multiply(pairs: Any, tile: Any, a: int, a_step: int, b: int, b_step: int, depth: int) -> Any:
        for _ in range(depth):
            right, left = load_columns(_FLOAT, b, columns), spread(a, a_step, _HEIGHT)
            if pairs is None:
                tile = outer_fma(tile, right, left)
            else:
                tile = outer_dot(tile, right, left)
            a, b = a + 4, b + b_step
        return tile

    return multiply


_multiply_wide, _multiply_narrow = _multiplier(2), _multiplier(1)


@jit
def score_rows(pairs: Any, query: int, query_step: int, keys: int, depth: int, scores: int, count: int) -> None:
    """scores[row, key] = query[row] · keys[key] for twelve rows and `count` keys, a multiple of 32."""
    for key in range(0, count, 32):
        for start in range(0, depth, SUMMED):
            here, channels = keys + 4 * (key + TILE * start), min(SUMMED, depth - start)
            tile = _multiply_wide(pairs, zeros(_HEIGHT, 2), query + 4 * start, query_step, here, 4 * TILE, channels)
            if start > 0:
                tile = add(tile, load_tile(scores + 4 * key, 4 * TILE, _HEIGHT, 2))
            store_tile(scores + 4 * key, 4 * TILE, _HEIGHT, tile)


@jit
def add_values(
    pairs: Any, weights: int, weight_step: int, values: int, dim: int, depth: int, fades: int, sums: int
) -> None:
    """sums[row] = fades[row] · sums[row] + weights[row, key] · values[key] for twelve rows.

    A tile's products are added up first: over a long context that rounds less than one sum that grows.
    """
    wide = dim & ~31
    for start in range(0, depth, SUMMED):
        first, here, keys = weights + 4 * start, values + 4 * start * dim, min(SUMMED, depth - start)
        for d in range(0, wide, 32):
            tile = _multiply_wide(pairs, zeros(_HEIGHT, 2), first, weight_step, here + 4 * d, 4 * dim, keys)
            old = load_tile(sums + 4 * d, 4 * dim, _HEIGHT, 2)
            tile = add(tile, old) if start > 0 else add_faded(tile, old, spread(fades, 4, _HEIGHT))
            store_tile(sums + 4 * d, 4 * dim, _HEIGHT, tile)
        if wide < dim:
            tile = _multiply_narrow(pairs, zeros(_HEIGHT, 1), first, weight_step, here + 4 * wide, 4 * dim, keys)
            old = load_tile(sums + 4 * wide, 4 * dim, _HEIGHT, 1)
            tile = add(tile, old) if start > 0 else add_faded(tile, old, spread(fades, 4, _HEIGHT))
            store_tile(sums + 4 * wide, 4 * dim, _HEIGHT, tile)


# --- softmax ---------------------------------------------------------------------------------------------------------


@jit
def finish_scores(scores: int, seen: int, scale: Any, cap: Any, hidden: int) -> Any:
    """Cap, hide and mask a row's scores; return the largest, float32. A cap scales the scores, too.

    Args:
        scores: address of float32; those from `seen` on, up to a multiple of 16, become −inf.
        scale: of the scores; cap: the softcap, or None.
        hidden: address of 0 or −inf for each key, to be added to the scores; 0: none is hidden.
    """
    chunks = (seen + 15) // 16
    if cap is not None:
        for i in range(chunks):
            store(scores + 64 * i, bend(load_f32(scores + 64 * i) * splat(np.float32(scale)), cap))
    if hidden != 0:
        for i in range(chunks):
            store(scores + 64 * i, load_f32(scores + 64 * i) + load_f32(hidden + 64 * i))
    none = splat(np.float32(-np.inf))
    if seen & 15:
        last = scores + 64 * (chunks - 1)
        store(last, choose_less(lane_numbers(), splat(np.float32(seen & 15)), load_f32(last), none))
    most = none
    for i in range(chunks):
        most = vmax(most, load_f32(scores + 64 * i))
    return lane_max(most)


@jit
def weigh_row(pairs: Any, scores: int, weights: int, seen: int, count: int, factor: Any, rest: Any, peak: Any) -> Any:
    """Write the weights exp(unit · (score − peak)) of a row's `seen` keys, and 0 for the others of `count`.

    The weights are bfloat16 with `pairs`, else float32. They are powers of 2; the largest is 1.

    Args:
        factor, rest: factor + rest · factor is unit · log2(e): the factor is rounded to float32.

    Returns:
        A vector whose lanes add up to the sum of the weights.
    """
    chunks = (seen + 15) // 16
    total, zero, times, top = splat(np.float32(0.0)), splat(np.float32(0.0)), splat(factor), splat(peak)
    for i in range(chunks):
        power = (load_f32(scores + 64 * i) - top) * times
        if pairs is None:
            weight = exp2(power, splat(rest))
            store(weights + 64 * i, weight)
        else:
            weight = exp2_rough(power)
            store_pairs(weights + 32 * i, weight)
        total = total + weight
    for i in range(chunks, count // 16):
        if pairs is None:
            store(weights + 64 * i, zero)
        else:
            store_pairs(weights + 32 * i, zero)
    return total


@jit
def weigh_rows(
    pairs: Any, scores: int, weights: int, seen: Array, count: int, scale: Any, cap: Any, hidden: int, factor: Any,
    rest: Any, peaks: int, masses: int, fades: int, tops: Array, row_sums: Array,
) -> None:  # fmt: skip
    """One step of online softmax for twelve rows.

    Args:
        scores: float32; weights, written: bfloat16 with `pairs`, else float32.
        seen: int64 [12], the keys that each row attends, of `count`.
        scale, cap, hidden: as `finish_scores` takes them.
        factor, rest: as `weigh_row` takes them.
        peaks, masses: addresses of 16 float32, updated: the largest score, the sum of the weights.
        fades: address of 16 float32, written: exp(unit · (old peak − new peak)).
        tops, row_sums: float32 [16] and [16, 16], buffers of the rows' largest scores and sums. Lanes 12 to 15 of
            `tops` are −inf, rows 12 to 15 of `row_sums` are 0: peaks and masses behind the twelve rows do not change.
    """
    for i in range(_TALL):
        tops[i] = finish_scores(scores + 4 * TILE * i, seen[i], scale, cap, hidden)
    old = load_f32(peaks)
    new = vmax(load_f32(address_of(tops)), old)
    fade = exp2((old - new) * splat(factor), splat(rest))
    store(peaks, new)
    store(fades, fade)
    for i in range(_TALL):
        row, line = scores + 4 * TILE * i, weights + (2 if pairs is not None else 4) * TILE * i
        store(address_of(row_sums[i]), weigh_row(pairs, row, line, seen[i], count, factor, rest, get(peaks + 4 * i)))
    store(masses, fma(load_f32(masses), fade, run_totals(address_of(row_sums), _RUNS)))


# --- a task ----------------------------------------------------------------------------------------------------------


@kernel
def prefill_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    pairs: Any,
    query: Any,
    key: Any,
    value: Any,
    block_ptr: Array,
    table: Array,
    valid: Array,
    block_size: int,
    cached: int,
    fresh: int,
    fresh_first: int,
    position: int,
    queries: int,
    each: int,
    kv_heads: int,
    group: int,
    dim: int,
    scale: float,
    cap: Any,
    sinks: Array,
    out: Array,
    lse: Array,
) -> None:
    """One task = `each` queries of one (row, KV head); those with the most keys come first."""
    item = tag.itemsize
    width = 2 if pairs is not None else 4  # bytes of a query's channel and of a weight
    depth = dim // 2 if pairs is not None else dim
    most = (each * group + _TALL - 1) // _TALL * _TALL
    line = dim * item
    # Query rows, sums, scores, weights, packed keys, packed values, a row of zeros; then peaks, masses and fades.
    sizes = most * dim * width, 4 * most * dim, 4 * _TALL * TILE, width * _TALL * TILE
    packed = TILE * dim * (2 * width) // (2 if pairs is not None else 1)
    scratch = np.empty((64 + sizes[0] + sizes[1] + sizes[2] + sizes[3] + 2 * packed + line + 64) // 4 + 32, np.float32)
    rows = (address_of(scratch) + 63) & ~63
    sums = rows + sizes[0]
    scores = sums + sizes[1]
    weights = scores + sizes[2]
    packed_keys = weights + sizes[3]
    packed_values = packed_keys + packed
    zero = packed_values + packed
    peaks, masses = np.zeros(most + 4, np.float32), np.zeros(most + 4, np.float32)  # in vectors of 16
    fades, tops, row_sums = np.empty(16, np.float32), np.full(16, -np.inf, np.float32), np.zeros((16, 16), np.float32)
    limits, seen, hidden = np.empty(most, np.int64), np.empty(_TALL, np.int64), np.empty(TILE, np.float32)
    key_rows, value_rows = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    for address in range(zero, zero + line, 4):
        put(address, np.float32(0.0))
    unit = 1.0 if cap is not None else scale  # of scores and peaks, in logits
    factor = np.float32(unit * _LOG2_E)
    rest = np.float32(unit * _LOG2_E / factor - 1.0)
    pieces = (queries + each - 1) // each
    begin, stop = (0 if cached > 0 else fresh_first), (fresh_first + fresh if fresh > 0 else cached)
    batch = tasks // (pieces * kv_heads)
    task = count_up(ticket, 0)
    while task < tasks:
        piece, b, h = pieces - 1 - task // (batch * kv_heads), task // kv_heads % batch, task % kv_heads
        q0 = piece * each
        q1 = min(q0 + each, queries)
        count = (q1 - q0) * group
        padded = (count + _TALL - 1) // _TALL * _TALL
        for r in range(padded):
            to, source = rows + r * dim * width, query[0]
            if r < count:
                g = h * group + r % group
                source += b * query[1][0] + g * query[1][1] + (q0 + r // group) * query[1][2]
                limits[r] = position + q0 + r // group + 1
            else:
                g, source, limits[r] = h * group, zero, 0
            if pairs is not None:
                copy_bytes(to, source, line)
            else:
                for d in range(0, dim, 16):
                    store(to + 4 * d, load(tag, source + d * item))
            for d in range(0, dim, 16):
                store(sums + 4 * (r * dim + d), splat(np.float32(0.0)))
            with_sink = sinks.shape[0] > 0
            peaks[r] = max(sinks[g] / unit, NOTHING) if with_sink else NOTHING  # a sink of −inf weighs nothing
            masses[r] = np.float32(math.exp(sinks[g] - peaks[r] * unit)) if with_sink else np.float32(0.0)
        end = min(stop, position + q1)
        for first in range(begin, end, TILE):
            filled = min(TILE, end - first)
            keys = (filled + 31) // 32 * 32
            any_hidden = False
            for i in range(keys):
                at = first + i
                visible = i < filled and (valid.shape[0] == 0 or valid[b, at] != 0)
                hidden[i] = np.float32(0.0) if visible or i >= filled else np.float32(-np.inf)
                any_hidden = any_hidden or (i < filled and not visible)
                if not visible:
                    key_rows[i] = value_rows[i] = zero
                elif at < cached:
                    record = block_ptr[table[b, at // block_size]] + 2 * h * block_size * line
                    key_rows[i] = record + at % block_size * line
                    value_rows[i] = key_rows[i] + block_size * line
                else:
                    token = at - fresh_first
                    key_rows[i] = key[0] + b * key[1][0] + h * key[1][1] + token * key[1][2]
                    value_rows[i] = value[0] + b * value[1][0] + h * value[1][1] + token * value[1][2]
            pack_keys(tag, pairs, key_rows, keys, dim, packed_keys)
            pack_values(tag, pairs, value_rows, keys, dim, packed_values)
            for r in range(0, padded, _TALL):
                newest = limits[min(r + _TALL, count) - 1]
                if newest <= first:
                    continue
                most_seen = min(filled, newest - first)
                wide = (most_seen + 31) // 32 * 32
                score_rows(pairs, rows + r * dim * width, dim * width, packed_keys, depth, scores, wide)
                for i in range(_TALL):
                    seen[i] = max(min(filled, limits[r + i] - first), 0)
                weigh_rows(
                    pairs, scores, weights, seen, wide, scale, cap, address_of(hidden) if any_hidden else 0, factor,
                    rest, address_of(peaks) + 4 * r, address_of(masses) + 4 * r, address_of(fades), tops, row_sums,
                )  # fmt: skip
                add_values(
                    pairs, weights, width * TILE, packed_values, dim,
                    (most_seen + 1) // 2 if pairs is not None else most_seen, address_of(fades), sums + 4 * r * dim,
                )  # fmt: skip
        for r in range(count):
            q, g, mass = q0 + r // group, h * group + r % group, masses[r]
            whole = splat(np.float32(1.0) if mass == 0.0 else mass)
            for d in range(0, dim, 16):
                store(address_of(out[b, q, g]) + 4 * d, load_f32(sums + 4 * (r * dim + d)) / whole)
            lse[b, g, q] = -np.inf if mass == 0.0 else peaks[r] * unit + math.log(mass)
        task = next_task(ticket)
    hold((scratch, hidden, peaks, masses, fades, tops, row_sums, limits, seen, key_rows, value_rows))


_NO_VALID, _NO_SINKS = np.empty((0, 0), np.uint8), np.empty(0, np.float32)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_ptr: Array,
    table: Array,
    valid: Array | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    block_size: int,
    cached: int,
    fresh_first: int,
    position: int,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
) -> Launch:
    """Prepare the attention of queries to cached tokens where they lie, and to tokens in tensors.

    Args:
        query: `[B, Hq, Q, D]`; key, value: `[B, Hkv, T, D]`, tokens `fresh_first` … of every row; float32, float16 or
            bfloat16 CPU tensors of one dtype, the last dimension contiguous.
        block_ptr: int64 [blocks], addresses of plain blocks; table: int32 [B, n], the blocks of tokens 0 … cached - 1.
        valid: uint8 [B, tokens or more], 0 where a token is attended by none; None: all are.
        out: float32 `[B, Q, Hq, D]`, lse: float32 `[B, Hq, Q]` (natural log), written: 0 and −inf where a query attends
            nothing.
        block_size: tokens in a block.
        cached: tokens read from blocks.
        fresh_first: position of the first token of `key` and `value`.
        position: position of query 0; query i attends tokens up to position + i.
        scale: of the scores; softcap: c in c · tanh(score / c), or None.
        sinks: float32 [Hq], logits that take weight and give nothing, or None.

    Raises:
        ValueError: shapes or strides that do not fit, or a size that the kernel does not cover.
        TypeError: another dtype.
    """
    (batch, heads, length, dim), kv_heads = query.shape, key.shape[1]
    tag = tag_of(query.dtype)
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(f"head dimension {dim} is not a multiple of 16 in 16..256; pad the heads")
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != dim or heads % kv_heads:
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit")
    if not query.dtype == key.dtype == value.dtype or block_size not in BLOCK_SIZES:
        raise ValueError(f"dtypes {query.dtype}, {key.dtype}, {value.dtype}, or block_size {block_size}, do not fit")
    if any(x.stride(3) != 1 or x.device.type != "cpu" for x in (query, key, value)):
        raise ValueError("query, key and value need a contiguous last dimension, in host memory")
    if not 0 <= cached <= table.shape[1] * block_size or (cached and fresh_first != cached) or scale <= 0:
        raise ValueError(f"cached={cached} tokens, the next at {fresh_first}, or scale={scale}, cannot be")
    stop = fresh_first + key.shape[2]
    valid, sinks = _NO_VALID if valid is None else valid, _NO_SINKS if sinks is None else sinks
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[1]))
    require("valid", valid, U8, (0, 0) if not valid.size else (batch, max(valid.shape[1], stop)))
    require("sinks", sinks, F32, (0,) if not sinks.size else (heads,))
    require("out", out.numpy(), F32, (batch, length, heads, dim))
    require("lse", lse.numpy(), F32, (batch, heads, length))
    group, item = heads // kv_heads, query.element_size()
    each = min(max(ROWS // group, 1), max(length, 1))
    pairs = True if query.dtype == torch.bfloat16 and _dots_are_fast() else None
    layouts = [(address, strides[:3]) for address, strides, _ in map(layout_of, (query, key, value))]
    args = (
        tag, pairs, *layouts, block_ptr, table, valid, block_size, cached, key.shape[2], fresh_first, position,
        length, each, kv_heads, group, dim, float(scale), None if softcap is None else float(softcap),
        sinks, out.numpy(), lse.numpy(),
    )  # fmt: skip
    tasks = -(-length // each) * batch * kv_heads
    cost = max(2 * batch * kv_heads * stop * dim * item, length * heads * stop)
    return Launch(prefill_kernel, tasks, args, cost, keep=(query, key, value, out, lse), label="a prompt's attention")


@functools.cache
def _dots_are_fast() -> bool:
    """Whether dot products of bfloat16 pairs beat float32 products here.

    On Zen 4 and 5 the instruction does twice the work of an FMA in the same time. On Intel's cores it takes four times
    as long as an FMA (Xeon of 2.3 GHz, one thread: 87 against 167 GFLOP/s in `score_rows`).
    """
    return has_feature("avx512bf16") and binding.get_host_cpu_name().startswith("znver")


@functools.cache
def _has_amx() -> bool:
    return bool(binding.get_host_cpu_features().get("amx-bf16"))


def faster_than_torch(dtype: torch.dtype) -> bool:
    """Whether this kernel attends queries faster than torch's flash attention for the CPU.

    Register tiles of twelve rows by 32 columns need AVX-512's 32 registers: with AVX2 LLVM spills them, and the kernel
    has 0.65 times torch's speed. On a CPU with AMX torch's products of bfloat16 are several times faster.
    """
    return dtype in TAGS and has_feature("avx512f") and not (dtype == torch.bfloat16 and _has_amx())


def pieces_of(length: int, past: int, heads: int, dim: int) -> list[tuple[int, int]]:
    """Cut queries into (first, count) whose launches are short enough that Ctrl-C is heeded between them."""
    cut, first = [], 0
    while first < length:
        count = max(int(_LAUNCH_OPERATIONS / (4 * heads * dim * (past + length))), LEAST)
        cut.append((first, min(count, length - first)))
        first += count
    return cut
