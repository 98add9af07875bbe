"""Decode attention to listed pairs of tokens, each with a weight: one query token of each row.

A pair is the tokens 2 · j and 2 · j + 1, which lie side by side in their block. The log weight is added to both scores.
Otherwise as `sparse_decode.py`: parts, softmax steps and their merge.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.cpu.kernels.block import clear_scores, shrink_sums, soften_scores, softmax_step
from hf_offload.cpu.kernels.packed import unpack_tokens
from hf_offload.cpu.kernels.parts import (
    PART_TOKENS,
    PARTS,
    clear_part,
    merge_parts,
    most_part_blocks,
    part_of,
    partial_results,
    partial_state,
)
from hf_offload.cpu.kernels.record import record_of
from hf_offload.cpu.kernels.sparse_decode import check_lists
from hf_offload.cpu.launch import (
    F32,
    I32,
    TAGS,
    Array,
    Launch,
    cap_of,
    group_size,
    head_tiles,
    jit,
    kernel,
    require,
    tag_of,
)
from hf_offload.cpu.memory import LINE, address_of, count_up, hold, prefetch
from hf_offload.cpu.simd.register_tiles import (
    dot_quad,
    load_columns,
    load_tile,
    outer_fma,
    spread,
    store_quads,
    store_tile,
)
from hf_offload.cpu.simd.vectors import MASKED, NOTHING, choose_less, load_f32, splat, store

STEP = 64  # pairs of a softmax step
_FLOAT = TAGS[torch.float32]


@jit
def _fetch(row: int, size: int) -> None:
    """Prefetch the keys or the values of a pair."""
    for line in range(0, size, LINE):
        prefetch(row + line, 2)


@jit
def _score_rows(
    tag: Any, heads: Any, rows: Array, first: int, tokens: int, ahead: int, query: int, dim: int, scores: int,
    stride: int,
) -> None:  # fmt: skip
    """scores[head, token] = query[head] · the keys at rows[first + token]; prefetch as many rows from `ahead` on."""
    size = 2 * dim * tag.itemsize
    for i in range(0, tokens, 4):
        at = first + i
        if ahead + i + 4 <= len(rows):
            _fetch(rows[ahead + i], size)
            _fetch(rows[ahead + i + 2], size)
        sums = dot_quad(tag, heads, (rows[at], rows[at + 1], rows[at + 2], rows[at + 3]), query, dim)
        store_quads(scores + 4 * i, stride, heads, sums)


@jit
def _add_rows(
    tag: Any, heads: Any, rows: Array, first: int, tokens: int, ahead: int, dim: int, weights: int, stride: int,
    sums: int,
) -> None:  # fmt: skip
    """sums[head] += weights[head, token] · the values at rows[first + token]; prefetch as `_score_rows` does."""
    wide, share = dim - dim % 64, 64 * tag.itemsize
    for d in range(0, wide, 64):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 4)
        for i in range(tokens):
            if ahead + i < len(rows):
                _fetch(rows[ahead + i] + d * tag.itemsize, share)
            columns = load_columns(tag, rows[first + i] + d * tag.itemsize, 4)
            tile = outer_fma(tile, columns, spread(weights + 4 * i, stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)
    for d in range(wide, dim, 16):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 1)
        for i in range(tokens):
            columns = load_columns(tag, rows[first + i] + d * tag.itemsize, 1)
            tile = outer_fma(tile, columns, spread(weights + 4 * i, stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)


@jit
def attend_rows(
    tag: Any, full: Any, rest: Any, group: int, keys: Array, values: Array, added: Array, first: int, tokens: int,
    ahead: int, query: int, dim: int, cap: float, scores: int, state: int, sums: int,
) -> None:  # fmt: skip
    """Attend the tokens first..first+tokens-1 of the lists as one softmax step.

    Args:
        keys, values: int64, the tokens' addresses; added: float32, what is added to their scores, MASKED: none.
        ahead: place in the lists of the tokens to prefetch; beyond the end: none.
        query: address of the scaled queries [G, D].
        scores: address of scratch float32 [G, 2 · STEP].
        state: peaks, masses and fades [G] each; sums: float32 [G, D].
    """
    stride, padded = 8 * STEP, (tokens + 15) & ~15
    nothing, none = splat(NOTHING), splat(MASKED)
    done = 0
    while done < group:
        at, to = query + 4 * done * dim, scores + done * stride
        if done + len(full) <= group:
            _score_rows(tag, full, keys, first, tokens, ahead if done == 0 else len(keys), at, dim, to, stride)
            done += len(full)
        else:
            _score_rows(tag, rest, keys, first, tokens, ahead if done == 0 else len(keys), at, dim, to, stride)
            done += len(rest)
    if cap > 0.0:
        soften_scores(group, scores, stride, padded, cap)
    for g in range(group):
        for i in range(0, padded, 16):
            more, place = load_f32(address_of(added) + 4 * (first + i)), scores + g * stride + 4 * i
            store(place, choose_less(more, nothing, none, load_f32(place) + more))
    clear_scores(group, scores, stride, tokens, padded)
    fades = state + 8 * group
    softmax_step(group, scores, stride, padded, state, state + 4 * group, fades)
    shrink_sums(group, sums, dim, fades)
    done = 0
    while done < group:
        at, to = scores + done * stride, sums + 4 * done * dim
        if done + len(full) <= group:
            _add_rows(tag, full, values, first, tokens, ahead if done == 0 else len(values), dim, at, stride, to)
            done += len(full)
        else:
            _add_rows(tag, rest, values, first, tokens, ahead if done == 0 else len(values), dim, at, stride, to)
            done += len(rest)


@kernel
def pair_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    full: Any,
    rest: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    pairs: Array,
    weights: Array,
    counts: Array,
    holes: Array,
    valid: Array,
    length: int,
    out: Array,
    lse: Array,
    block_size: int,
    scale: float,
    cap: float,
    parts: int,
    partial: Array,
    finished: Array,
    packed: Any,
) -> None:
    """One task = one part of the pairs of one (row, KV head); the thread that finishes its last part merges them."""
    dim, kv_heads = query.shape[2], counts.shape[1]
    group = query.shape[1] // kv_heads
    line = dim * tag.itemsize
    record = 2 * block_size * line
    part, partial_step = 4 * group * dim, 4 * partial.shape[1]
    state_offset = partial_state(group, dim, False)
    most = 2 * (most_part_blocks(pairs.shape[2], parts, 2, STEP) + STEP)
    keys, values, added = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most + 16, np.float32)
    # Scratch: the scaled query, the scores of a step, a row of zeros, and where blocks are packed a step's keys and
    # values in float32.
    spare = 0 if packed is None else 16 * STEP * dim
    scratch = np.empty((64 + part + 8 * STEP * group + 4 * dim + spare) // 4 + 16, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    scores = queries + part
    zero = scores + 8 * STEP * group
    spare = zero + 4 * dim
    for d in range(0, 4 * dim, 64):
        store(zero + d, splat(np.float32(0.0)))
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        head = task // parts
        b, h = head // kv_heads, head % kv_heads
        begin, mine = part_of(task, parts, 2, STEP, counts)
        sums = address_of(partial) + task * partial_step
        state = sums + state_offset
        source = address_of(query) + head * part
        for place in range(0, part, 64):
            store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
        clear_part(sums, dim, group, False)
        for i in range(mine):
            token, weight = 2 * np.int64(pairs[b, h, begin + i]), weights[b, h, begin + i]
            block, offset = token // block_size, token % block_size
            place = record_of(block_ptr[table[b, block]], h, record, packed)
            checked = holes[b, block] != 0 or token + 2 > length
            for j in range(2):
                at = 2 * i + j
                added[at] = weight
                if checked and (token + j >= length or valid[b, token + j] == 0):
                    added[at], keys[at], values[at] = MASKED, zero, zero
                elif packed is not None:
                    keys[at], values[at] = place, offset + j
                else:
                    keys[at] = place + (offset + j) * line
                    values[at] = keys[at] + block_size * line
            if packed is None and i < STEP:
                _fetch(keys[2 * i], 2 * line)
                _fetch(values[2 * i], 2 * line)
        for at in range(2 * mine, 2 * (mine + STEP)):  # is scored, or prefetched, and not attended
            keys[at] = values[at] = zero
        for first in range(0, 2 * mine, 2 * STEP):
            tokens = min(2 * STEP, 2 * mine - first)
            if packed is None:
                attend_rows(
                    tag, full, rest, group, keys, values, added, first, tokens, first + 2 * STEP, queries, dim, cap,
                    scores, state, sums,
                )  # fmt: skip
            else:
                for i in range(first, first + tokens):
                    if added[i] > NOTHING:
                        key, value = spare + 4 * dim * (i - first), spare + 4 * dim * (2 * STEP + i - first)
                        unpack_tokens(packed, tag, keys[i], key, value, values[i], 1, dim, block_size)
                        keys[i], values[i] = key, value
                attend_rows(
                    _FLOAT, full, rest, group, keys, values, added, first, tokens, len(keys), queries, dim, cap, scores,
                    state, sums,
                )  # fmt: skip
        if count_up(finished, head) == parts - 1:
            merge_parts(
                address_of(partial) + head * parts * partial_step, parts, partial_step, dim, group, False,
                lse[b, h * group : (h + 1) * group], address_of(out) + head * part, 0,
            )  # fmt: skip
        count_up(ticket, 1)
    hold(scratch)
    hold(keys)
    hold(values)
    hold(added)
    hold(partial)


def attend_pairs(
    query: Array,
    block_ptr: Array,
    table: Array,
    pairs: Array,
    weights: Array,
    counts: Array,
    holes: Array,
    valid: Array,
    length: int,
    out: Array,
    lse: Array,
    *,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
    packed: Any = None,
) -> Launch:
    """Prepare softmax attention of one query token of each row to listed pairs.

    Args:
        pairs: int32 [B, Hkv, C], each at most once; entries from the count on are ignored.
        weights: float32 [B, Hkv, C], added to both scores of a pair, after the softcap.
        counts: int32 [B, Hkv], number of pairs.
        query, block_ptr, table, holes, valid, length, out, lse, kv_dtype, block_size, scale, softcap, packed: as in
            `sparse_decode`.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    kv_heads, room = pairs.shape[1:]
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    check_lists(query, block_ptr, table, holes, valid, length, out, lse, block_size)
    require("pairs", pairs, I32, (batch, kv_heads, room))
    require("weights", weights, F32, (batch, kv_heads, room))
    require("counts", counts, I32, (batch, kv_heads))
    tag = tag_of(kv_dtype)
    heads = batch * kv_heads
    parts = max(1, min(-(-2 * room // PART_TOKENS), PARTS // heads))  # of shapes alone, as in `sparse_decode`
    partial = partial_results(heads * parts, query_heads // kv_heads, dim, False)
    finished = np.zeros(heads, np.int64)
    args = (
        tag, full, rest, query, block_ptr, table, pairs, weights, counts, holes, valid, int(length), out, lse,
        int(block_size), float(scale), cap_of(softcap) or 0.0, parts, partial, finished, packed,
    )  # fmt: skip
    return Launch(pair_kernel, heads * parts, args, heads * 2 * room * 2 * dim * tag.itemsize, counters=finished)
