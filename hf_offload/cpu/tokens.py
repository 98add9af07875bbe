"""Sparse decode over single tokens: every row and KV head has a list of its own length.

The lists lie behind one another; tasks are cut by tokens, so that short lists cost nothing and long ones are shared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .block import bend_weights, clear_scores, scale_weights, shrink_sums, soften_scores, softmax_step
from .launch import (
    F32,
    I32,
    I64,
    Array,
    Launch,
    check_geometry,
    group_size,
    head_tiles,
    jit,
    kernel,
    new_ticket,
    require,
    tag_of,
)
from .memory import LINE, address_of, count_up, hold, prefetch
from .parts import NO_KBAR, PART_TOKENS, PARTS, clear_part, merge_parts, partial_results, partial_state
from .tile import dot_quad, load_columns, load_tile, outer_fma, spread, store_quads, store_tile
from .vector import load_f32, splat, store

_STEP = 64  # tokens of a softmax step


@jit
def _score_rows(
    tag: Any, heads: Any, rows: Array, first: int, last: int, values: int, leads: bool, query: int, dim: int,
    scores: int, stride: int,
) -> None:  # fmt: skip
    """scores[head, i] = query[head] . key at rows[first + i], in fours; prefetch the rows of the next step."""
    size = dim * tag.itemsize
    for i in range(first, last, 4):
        end = last - 1
        four = (rows[i], rows[min(i + 1, end)], rows[min(i + 2, end)], rows[min(i + 3, end)])
        if leads:
            for later in range(i + _STEP, min(i + _STEP + 4, rows.shape[0])):
                for line in range(0, size, LINE):
                    prefetch(rows[later] + line, 2)
                    prefetch(rows[later] + values + line, 2)
        store_quads(scores + 4 * (i - first), stride, heads, dot_quad(tag, heads, four, query, dim))


@jit
def _add_rows(
    tag: Any, heads: Any, rows: Array, first: int, last: int, offset: int, dim: int, weights: int, stride: int,
    sums: int,
) -> None:  # fmt: skip
    """sums[head] += weights[head, i] * vector at rows[first + i] + offset."""
    wide = dim - dim % 64
    for d in range(0, wide, 64):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 4)
        for i in range(first, last):
            columns = load_columns(tag, rows[i] + offset + d * tag.itemsize, 4)
            tile = outer_fma(tile, columns, spread(weights + 4 * (i - first), stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)
    for d in range(wide, dim, 16):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 1)
        for i in range(first, last):
            columns = load_columns(tag, rows[i] + offset + d * tag.itemsize, 1)
            tile = outer_fma(tile, columns, spread(weights + 4 * (i - first), stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)


@jit
def _attend_rows(
    tag: Any, heads: Any, rows: Array, first: int, last: int, values: int, leads: bool, query: int, dim: int,
    cap: float, scores: int, stride: int, state: int, state_step: int, out: int, kbar: int,
) -> None:  # fmt: skip
    """Let one register tile of heads attend to the tokens at rows[first..last-1], as one softmax step."""
    count, tokens = len(heads), last - first
    padded = (tokens + 15) & ~15
    _score_rows(tag, heads, rows, first, last, values, leads, query, dim, scores, stride)
    if cap > 0.0:
        soften_scores(count, scores, stride, padded, cap)
    clear_scores(count, scores, stride, tokens, padded)
    bent = scores + count * stride
    if cap > 0.0 and kbar != 0:
        bend_weights(count, scores, bent, stride, padded, cap)
    softmax_step(count, scores, stride, padded, state, state + state_step, state + 2 * state_step)
    shrink_sums(count, out, dim, state + 2 * state_step)
    _add_rows(tag, heads, rows, first, last, values, dim, scores, stride, out)
    if kbar != 0:
        shrink_sums(count, kbar, dim, state + 2 * state_step)
        if cap > 0.0:
            scale_weights(count, bent, scores, stride, padded)
            _add_rows(tag, heads, rows, first, last, 0, dim, bent, stride, kbar)
        else:
            _add_rows(tag, heads, rows, first, last, 0, dim, scores, stride, kbar)


@kernel
def tokens_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    full: Any,
    rest: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    tokens: Array,
    offsets: Array,
    first_part: Array,
    share: int,
    out: Array,
    lse: Array,
    kbar: Array,
    block_size: int,
    scale: float,
    cap: float,
    partial: Array,
    finished: Array,
) -> None:
    """One task = up to `share` tokens of one (row, KV head); the last to finish a head merges its parts."""
    dim = query.shape[2]
    kv_heads = finished.shape[0] // query.shape[0]
    group = query.shape[1] // kv_heads
    size = dim * tag.itemsize
    values, record, stride = block_size * size, 2 * block_size * size, 4 * _STEP
    wants_kbar = kbar.shape[0] > 0
    part, state_step = 4 * group * dim, 4 * group
    state_offset, partial_step = partial_state(group, dim, wants_kbar), 4 * partial.shape[1]
    scratch = np.empty(16 + (part + 8 * stride) // 4, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    scores = queries + part
    places = np.empty(share, np.int64)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        head = np.searchsorted(first_part, task, "right") - 1
        b, h = head // kv_heads, head % kv_heads
        begin = offsets[head] + (task - first_part[head]) * share
        mine = min(share, offsets[head + 1] - begin)
        rows = places[:mine]
        for i in range(mine):
            token = np.int64(tokens[begin + i])
            rows[i] = block_ptr[table[b, token // block_size]] + h * record + token % block_size * size
        sums = address_of(partial) + task * partial_step
        state = sums + state_offset
        source = address_of(query) + head * part
        for place in range(0, part, 64):
            store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
        clear_part(sums, dim, group, wants_kbar)
        for first in range(0, mine, _STEP):
            last = min(first + _STEP, mine)
            done = 0
            while done < group:
                tile = 4 * done * dim
                at, sum_at = queries + tile, sums + tile
                key_at = sums + part + tile if wants_kbar else 0
                if done + len(full) <= group:
                    _attend_rows(
                        tag, full, rows, first, last, values, done == 0, at, dim, cap, scores, stride,
                        state + 4 * done, state_step, sum_at, key_at,
                    )  # fmt: skip
                    done += len(full)
                else:
                    _attend_rows(
                        tag, rest, rows, first, last, values, done == 0, at, dim, cap, scores, stride,
                        state + 4 * done, state_step, sum_at, key_at,
                    )  # fmt: skip
                    done += len(rest)
        parts = first_part[head + 1] - first_part[head]
        if count_up(finished, head) == parts - 1:
            merge_parts(
                address_of(partial) + first_part[head] * partial_step, parts, partial_step, dim, group, wants_kbar,
                lse[b, h * group : (h + 1) * group], address_of(out) + head * part, address_of(kbar) + head * part,
            )  # fmt: skip
        count_up(ticket, 1)
    hold(scratch)
    hold(partial)


def sparse_decode_tokens(
    query: Array,
    block_ptr: Array,
    table: Array,
    tokens: Array,
    offsets: Array,
    out: Array,
    lse: Array,
    kbar: Array | None,
    *,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Launch:
    """Prepare exact softmax attention of one query token a row over listed tokens.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        block_ptr: int64 [P], address of each physical block, [Hkv] records [2 (K, V), block_size, D]; none packed.
        table: int32 [B, N], physical block of each logical one.
        tokens: int32 [T], positions in their rows, each at most once in a list; ascending ones read fastest.
        offsets: int64 [B * Hkv + 1], ascending: list i, of row i // Hkv and KV head i % Hkv, is
            tokens[offsets[i]:offsets[i + 1]].
        out: float32 [B, Hq, D], written; 0 where a list is empty.
        lse: float32 [B, Hq], written: natural log of the sum of exp(score); -inf where a list is empty.
        kbar: float32 [B, Hq, D] or None, written, as in `decode.sparse_decode`.
        kv_dtype, block_size, scale, softcap: as in `decode.sparse_decode`.

    Raises:
        ValueError: shapes that contradict each other, positions outside the table, or what the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    heads = len(offsets) - 1
    if heads < batch or heads % batch:
        raise ValueError(f"{len(offsets)} offsets are not one more than {batch} rows times KV heads")
    check_geometry(dim, block_size)
    group = group_size(query_heads, heads // batch)
    full, rest = head_tiles(group)
    require("query", query, F32, query.shape)
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[-1]))
    require("tokens", tokens, I32, tokens.shape[:1])
    require("offsets", offsets, I64, (heads + 1,))
    require("out", out, F32, query.shape)
    require("lse", lse, F32, (batch, query_heads))
    if kbar is None:
        kbar = NO_KBAR
    else:
        require("kbar", kbar, F32, query.shape)
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(tokens) or counts.min() < 0:
        raise ValueError(f"offsets must ascend from 0 to the {len(tokens)} tokens, got {offsets}")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < table.shape[1] * block_size:
        raise ValueError(f"tokens {tokens.min()}..{tokens.max()}: the table holds {table.shape[1] * block_size}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap")
    share = max(PART_TOKENS, -(-len(tokens) // PARTS))
    first_part = np.zeros(heads + 1, np.int64)
    np.cumsum(np.maximum(-(-counts // share), 1), out=first_part[1:])
    tag, parts = tag_of(kv_dtype), int(first_part[-1])
    partial, finished = partial_results(parts, group, dim, kbar is not NO_KBAR), np.zeros(heads, np.int64)
    args = (
        tag, full, rest, query, block_ptr, table, tokens, offsets, first_part, share, out, lse, kbar, int(block_size),
        float(scale), float(softcap or 0.0), partial, finished,
    )  # fmt: skip
    cost = 2 * len(tokens) * dim * tag.itemsize
    return Launch(tokens_kernel, parts, args, new_ticket(), cost, counters=finished)
