"""Attention weights of stored tokens under several queries, streamed: no matrix of queries by tokens is kept.

128 tokens are scored for four rows of queries (`query_rows.py`), and their weights are joined at once.
Source: HGCA, section 3.2.2, "Re-evaluation".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.cpu.kernels.block import STEP_TOKENS, clear_scores
from hf_offload.cpu.kernels.int8_blocks import packed_bytes
from hf_offload.cpu.kernels.parts import PARTS
from hf_offload.cpu.launch import F32, Array, Launch, jit, kernel, require, tag_of
from hf_offload.cpu.memory import address_of, count_up, hold
from hf_offload.cpu.simd.convert import store_first
from hf_offload.cpu.simd.vectors import choose_less, exp, fma, load_f32, splat, store, vmax

from .query_lse import check_queries, key_bytes, step_share
from .query_rows import find_ends, open_step, pick_rows, score_rows, scratch_bytes

_NO_COEFFICIENT = np.empty(0, np.float32)


@jit
def _add_row(scores: int, tokens: int, lse: float, coefficient: float, largest: bool, sums: int) -> None:
    """sums += coefficient * exp(scores - lse), or the larger of both."""
    shift, factor = splat(np.float32(lse)), splat(np.float32(coefficient))
    for place in range(0, 4 * tokens, 64):
        weight, old = exp(load_f32(scores + place) - shift), load_f32(sums + place)
        store(sums + place, vmax(weight, old) if largest else fma(weight, factor, old))


@kernel
def weigh_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    first: int,
    stop: int,
    start: int,
    lse: Array,
    coefficient: Array,
    near: int,
    joined: Array,
    kv_heads: int,
    block_size: int,
    scale: float,
    cap: float,
    share: int,
    parts: int,
    packed: Any,
    packed_record: int,
) -> None:
    """One task = up to `share` tokens of one (row, KV head)."""
    batch, query_heads, queries, dim = query.shape
    group = query_heads // kv_heads
    rows, largest = group * queries, coefficient.shape[0] == 0
    record = 2 * block_size * dim * tag.itemsize
    width, stride = max(STEP_TOKENS, block_size), 4 * max(STEP_TOKENS, block_size)
    scratch = np.empty(scratch_bytes(dim, block_size) // 4 + 16 + group * width, np.float32)
    tile = (address_of(scratch) + 63) & ~63
    scores = tile + 16 * dim
    marks = scores + 4 * stride
    sums = marks + stride
    spare = sums + group * stride
    addresses, picked, ends = np.empty(width // block_size, np.int64), np.empty(4, np.int64), np.empty(rows, np.int64)
    totals = lse.reshape(batch * kv_heads, rows)
    factors, targets = np.ones(rows, np.float32), np.empty(rows, np.int64)
    for g in range(group):
        for i in range(queries):
            targets[g * queries + i] = sums + g * stride
            if not largest:
                factors[g * queries + i] = coefficient[i]
    zero = splat(np.float32(0.0))
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        head, part = task // parts, task % parts
        b, h = head // kv_heads, head % kv_heads
        find_ends(ends, 0, queries, start, stop, valid[b])
        for row in range(rows):
            behind = start + row % queries + 1 - near
            ends[row] = 0 if totals[head, row] == -np.inf else min(ends[row], behind)
        source = address_of(query) + 4 * head * rows * dim
        low = first + part * share
        for begin in range(low, min(low + share, stop), width):
            whole = min(begin + width, low + share, stop) - begin
            end, masked = open_step(
                addresses, block_ptr, table[b], holes[b], valid[b], begin, begin + whole, h, record, block_size,
                packed, packed_record, marks,
            )  # fmt: skip
            place = address_of(joined) + 4 * (head * group * joined.shape[2] + begin)
            for g in range(group):
                for token in range(0, whole, 16):
                    store(sums + g * stride + 4 * token, zero)
            row = 0 if end > begin else rows
            while row < rows:
                filled, row = pick_rows(picked, ends, row, begin, source, dim, scale, tile)
                if filled == 0:
                    break
                seen = 0
                for i in range(filled):
                    seen = max(seen, min(ends[picked[i]], end) - begin)
                score_rows(
                    tag, addresses, tile, dim, block_size, scores, stride, seen, cap, marks, masked, packed, spare
                )
                padded = (seen + 15) & ~15
                for i in range(filled):
                    at = picked[i]
                    clear_scores(1, scores + i * stride, stride, min(ends[at] - begin, seen), padded)
                    _add_row(scores + i * stride, padded, totals[head, at], factors[at], largest, targets[at])
            for g in range(group):
                for token in range(0, whole, 16):
                    x = load_f32(sums + g * stride + 4 * token)
                    if masked:
                        x = choose_less(zero, load_f32(marks + 4 * token), x, zero)
                    store_first(place + 4 * (g * joined.shape[2] + token), whole - token, x)
        count_up(ticket, 1)
    hold(scratch)
    hold(query)
    hold(joined)


def weigh_tokens(
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    first: int,
    stop: int,
    start: int,
    lse: Array,
    coefficient: Array | None,
    joined: Array,
    *,
    kv_heads: int,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
    near: int = 0,
    packed: bool = False,
) -> Launch:
    """Prepare joining the attention weights of tokens first..stop-1 of every row under several queries.

    The weight of a token is w_i = exp(score - lse) under query i, 0 where the query does not see it or is too near.
    With coefficients they are joined to sum_i coefficient_i * w_i, without to max_i w_i.

    Args:
        query, block_ptr, table, holes, valid, first, stop, start: as in `query_lse.query_lse`.
        lse: float32 [B, Hq, Q], natural log of each query's sum of exp(score), no smaller than any score of its; a
            query with -inf is left out.
        coefficient: float32 [Q] or None.
        joined: float32 [B, Hq, T'], T' at least `stop`, written: 0 where a token is not valid.
        kv_heads, kv_dtype, block_size, scale, softcap, packed: as in `query_lse.query_lse`.
        near: so many tokens up to a query, itself among them, get nothing from it.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    check_queries(query, block_ptr, table, holes, valid, first, stop, start, lse, kv_heads, block_size, softcap)
    batch, query_heads, queries, dim = query.shape
    require("joined", joined, F32, (batch, query_heads, joined.shape[-1]))
    if coefficient is None:
        coefficient = _NO_COEFFICIENT
    else:
        require("coefficient", coefficient, F32, (queries,))
    if joined.shape[2] < stop:
        raise ValueError(f"joined holds {joined.shape[2]} tokens, fewer than stop {stop}")
    if near < 0:
        raise ValueError(f"near must not be negative, got {near}")
    heads = batch * kv_heads
    share = step_share(stop - first, max(1, PARTS // heads), block_size)
    parts = -(-(stop - first) // share)
    args = (
        tag_of(kv_dtype), query, block_ptr, table, holes, valid, int(first), int(stop), int(start), lse, coefficient,
        int(near), joined, int(kv_heads), int(block_size), float(scale), float(softcap or 0.0), share, parts,
        0 if packed else None, packed_bytes(dim, block_size),
    )  # fmt: skip
    return Launch(weigh_kernel, heads * parts, args, key_bytes(query, stop - first, kv_dtype))
