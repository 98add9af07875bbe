"""Sparse decode: one query token a row attends to chosen blocks of the host pool.

Shapes: query [B, Hq, D], blocks [B, Hkv, C]; the Hq / Hkv query heads of a KV head share one pass over its blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .block import (
    STEP_TOKENS,
    add_block,
    bend_weights,
    clear_scores,
    mask_scores,
    scale_weights,
    score_block,
    shrink_sums,
    soften_scores,
    softmax_step,
)
from .launch import (
    F32,
    I32,
    I64,
    U8,
    Array,
    Launch,
    check_geometry,
    group_size,
    head_tiles,
    jit,
    new_ticket,
    require,
    tag_of,
)
from .memory import address_of, count_up, get, hold, put
from .vector import NOTHING, load_f32, splat, store

_NO_KBAR = np.empty((0, 0, 0), np.float32)


@jit
def _attend(
    tag: Any,
    heads: Any,
    addresses: Array,
    chosen: Array,
    first: int,
    last: int,
    valid: Array,
    holes: Array,
    length: int,
    query: int,
    dim: int,
    block_size: int,
    cap: float,
    scores: int,
    stride: int,
    state: int,
    state_step: int,
    out: int,
    kbar: int,
    leads: bool,
) -> None:
    """Let one register tile of heads attend to the chosen blocks first..last-1, as one softmax step.

    The tile that `leads` prefetches the blocks of the next step; for the others they are on their way.
    """
    count = len(heads)
    row = dim * tag.itemsize
    values = block_size * row
    ahead = last - first
    tokens = (last - first) * block_size
    padded = (tokens + 15) & ~15
    for i in range(first, last):
        place = scores + 4 * (i - first) * block_size
        score_block(
            tag, heads, addresses[i], addresses[i + ahead] if leads else 0, query, dim, block_size, place, stride
        )
    if cap > 0.0:
        soften_scores(count, scores, stride, padded, cap)
    clear_scores(count, scores, stride, tokens, padded)
    for i in range(first, last):
        begin = chosen[i] * block_size
        if begin + block_size > length or holes[chosen[i]] != 0:
            place = scores + 4 * (i - first) * block_size
            mask_scores(count, place, stride, valid, begin, length - begin, block_size)
    bent = scores + count * stride
    if cap > 0.0 and kbar != 0:
        bend_weights(count, scores, bent, stride, padded, cap)
    softmax_step(count, scores, stride, padded, state, state + state_step, state + 2 * state_step)
    shrink_sums(count, out, dim, state + 2 * state_step)
    key_weights = scores
    if kbar != 0:
        shrink_sums(count, kbar, dim, state + 2 * state_step)
        if cap > 0.0:
            scale_weights(count, bent, scores, stride, padded)
            key_weights = bent
    for part in range(2 if kbar != 0 else 1):  # V, then K; one call, as every copy of it costs compile time
        offset, weights, sums = (values, scores, out) if part == 0 else (0, key_weights, kbar)
        for i in range(first, last):
            begin = chosen[i] * block_size
            masked = begin + block_size > length or holes[chosen[i]] != 0
            add_block(
                tag, heads, addresses[i] + offset, addresses[i + ahead] if leads and part == 0 else 0, dim, block_size,
                weights + 4 * (i - first) * block_size, stride, sums, valid, begin, min(block_size, length - begin),
                masked,
            )  # fmt: skip


@jit
def _finish(sums: int, dim: int, group: int, masses: int, target: int) -> None:
    """target[head] = sums[head] / mass[head], 0 where nothing was attended."""
    for head in range(group):
        mass = get(masses + 4 * head)
        share = np.float32(0.0) if mass == np.float32(0.0) else np.float32(1.0) / mass
        for d in range(0, dim, 16):
            place = 4 * (head * dim + d)
            store(target + place, load_f32(sums + place) * splat(share))


@jit
def decode_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    full: Any,
    rest: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    blocks: Array,
    counts: Array,
    holes: Array,
    valid: Array,
    length: int,
    out: Array,
    lse: Array,
    kbar: Array,
    block_size: int,
    scale: float,
    cap: float,
) -> None:
    """One task = one (row, KV head)."""
    dim = query.shape[2]
    kv_heads = counts.shape[1]
    group = query.shape[1] // kv_heads
    record = 2 * block_size * dim * tag.itemsize
    step = max(1, STEP_TOKENS // block_size)
    stride = 4 * max(STEP_TOKENS, block_size)
    wants_kbar = kbar.shape[0] > 0
    # Scratch: scaled query, sum of V and sum of K [group, dim] each; peak, mass, fade [group]; scores and a second
    # set of weights [4, stride]. Addresses of the chosen blocks, and a copy of the last for the prefetches beyond it.
    part = 4 * group * dim
    state_step = 4 * group
    scratch = np.empty(16 + (3 * part + 3 * state_step + 8 * stride) // 4, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    sums, key_sums = queries + part, queries + 2 * part
    scores = queries + 3 * part
    state = scores + 8 * stride
    addresses = np.empty(blocks.shape[2] + step + 1, np.int64)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        b, h = task // kv_heads, task % kv_heads
        source = address_of(query) + task * part
        for place in range(0, part, 64):
            store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
            store(sums + place, splat(np.float32(0.0)))
            store(key_sums + place, splat(np.float32(0.0)))
        for head in range(group):
            put(state + 4 * head, NOTHING)
            put(state + state_step + 4 * head, np.float32(0.0))
        count = counts[b, h]
        chosen = blocks[b, h]
        for i in range(count):
            addresses[i] = block_ptr[table[b, chosen[i]]] + h * record
        for i in range(count, count + step):
            addresses[i] = addresses[max(count - 1, 0)]
        for first in range(0, count, step):
            last = min(first + step, count)
            done = 0
            while done + len(full) <= group:
                tile = 4 * done * dim
                _attend(
                    tag, full, addresses, chosen, first, last, valid[b], holes[b], length, queries + tile, dim,
                    block_size, cap, scores, stride, state + 4 * done, state_step, sums + tile,
                    key_sums + tile if wants_kbar else 0, done == 0,
                )  # fmt: skip
                done += len(full)
            if done < group:
                tile = 4 * done * dim
                _attend(
                    tag, rest, addresses, chosen, first, last, valid[b], holes[b], length, queries + tile, dim,
                    block_size, cap, scores, stride, state + 4 * done, state_step, sums + tile,
                    key_sums + tile if wants_kbar else 0, done == 0,
                )  # fmt: skip
        for head in range(group):
            mass = get(state + state_step + 4 * head)
            peak = get(state + 4 * head)
            lse[b, h * group + head] = -np.inf if mass == np.float32(0.0) else peak + np.log(mass)
        _finish(sums, dim, group, state + state_step, address_of(out) + task * part)
        if wants_kbar:
            _finish(key_sums, dim, group, state + state_step, address_of(kbar) + task * part)
        count_up(ticket, 1)
    hold(scratch)


def sparse_decode(
    query: Array,
    block_ptr: Array,
    table: Array,
    blocks: Array,
    counts: Array,
    holes: Array,
    valid: Array,
    length: int,
    out: Array,
    lse: Array,
    kbar: Array | None,
    *,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Launch:
    """Prepare exact softmax attention of one query token a row over chosen blocks.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        block_ptr: int64 [P], address in bytes of each physical block, a record [Hkv, 2 (K, V), block_size, D].
        table: int32 [B, N], physical block of each logical one.
        blocks: int32 [B, Hkv, C], the logical blocks to attend, each at most once; ignored from the count on.
        counts: int32 [B, Hkv], how many.
        holes: uint8 [B, N], 1 where a filled token of the block is not valid.
        valid: uint8 [B, T], 1 where the token may be attended (read only in blocks with holes and in the last one).
        length: tokens in every row; blocks beyond it contribute nothing.
        out: float32 [B, Hq, D], written: attention output; 0 where nothing is attended.
        lse: float32 [B, Hq], written: natural log of the sum of exp(score); -inf where nothing is attended.
        kbar: float32 [B, Hq, D] or None, written: the keys averaged with the softmax weights (with a softcap, each
            weight times the cap's derivative), for a first-order correction of the query.
        kv_dtype: dtype of the pool: torch.float32, float16 or bfloat16.
        block_size: tokens of a block: 8, 16, 32, 64 or 128.
        scale: factor of the scores, usually D ** -0.5.
        softcap: c in score = c * tanh(score / c), or None.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    kv_heads, capacity = blocks.shape[1:]
    check_geometry(dim, block_size)
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    require("query", query, F32, (batch, query_heads, dim))
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[-1]))
    require("blocks", blocks, I32, (batch, kv_heads, capacity))
    require("counts", counts, I32, (batch, kv_heads))
    require("holes", holes, U8, (batch, holes.shape[-1]))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    require("out", out, F32, query.shape)
    require("lse", lse, F32, (batch, query_heads))
    if kbar is None:
        kbar = _NO_KBAR
    else:
        require("kbar", kbar, F32, query.shape)
    if min(valid.shape[1], holes.shape[1] * block_size) < length:
        raise ValueError(f"valid {valid.shape} or holes {holes.shape} covers fewer tokens than length {length}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap")
    tag = tag_of(kv_dtype)
    tasks = batch * kv_heads
    args = (
        tag, full, rest, query, block_ptr, table, blocks, counts, holes, valid, int(length), out, lse, kbar,
        int(block_size), float(scale), float(softcap or 0.0),
    )  # fmt: skip
    return Launch(decode_kernel, tasks, args, new_ticket(), tasks * capacity * 2 * block_size * dim * tag.itemsize)
