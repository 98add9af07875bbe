"""Exact log mass of the newest tokens, those in blocks that have no digest yet.

Shapes: query [B, Hq, D] against the keys of blocks first_block.. up to `length` tokens; lse [B, Hq].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .block import clear_scores, mask_scores, score_block, soften_scores, softmax_step
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
from .memory import address_of, get, hold, put, take
from .vector import NOTHING, load_f32, splat, store


@jit
def _absorb(
    tag: Any, heads: Any, keys: int, query: int, dim: int, block_size: int, valid: Array, begin: int, masked: bool,
    length: int, cap: float, scores: int, state: int, state_step: int,
) -> None:  # fmt: skip
    """Add one block's tokens to the log-sum-exp of one register tile of heads."""
    count, stride = len(heads), 4 * max(block_size, 16)
    score_block(tag, heads, keys, 0, query, dim, block_size, scores, stride)
    if cap > 0.0:
        soften_scores(count, scores, stride, stride // 4, cap)
    clear_scores(count, scores, stride, block_size, stride // 4)
    if masked:
        mask_scores(count, scores, stride, valid, begin, length - begin, block_size)
    softmax_step(count, scores, stride, stride // 4, state, state + state_step, state + 2 * state_step)


@jit
def tail_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    full: Any,
    rest: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    first_block: int,
    length: int,
    holes: Array,
    valid: Array,
    lse: Array,
    kv_heads: int,
    block_size: int,
    scale: float,
    cap: float,
) -> None:
    """One task = one (row, KV head)."""
    dim = query.shape[2]
    group = query.shape[1] // kv_heads
    part, state_step = 4 * group * dim, 4 * group
    record = 2 * block_size * dim * tag.itemsize
    scratch = np.empty((part + 3 * state_step) // 4 + 4 * max(block_size, 16), np.float32)
    queries = address_of(scratch)
    state = queries + part
    scores = state + 3 * state_step
    while True:
        task = take(ticket)
        if task >= tasks:
            break
        b, h = task // kv_heads, task % kv_heads
        source = address_of(query) + task * part
        for place in range(0, part, 64):
            store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
        for head in range(group):
            put(state + 4 * head, NOTHING)
            put(state + state_step + 4 * head, np.float32(0.0))
        for n in range(first_block, (length + block_size - 1) // block_size):
            keys = block_ptr[table[b, n]] + h * record
            begin = n * block_size
            masked = holes[b, n] != 0 or begin + block_size > length
            done = 0
            while done + len(full) <= group:
                place = queries + 4 * done * dim
                _absorb(
                    tag, full, keys, place, dim, block_size, valid[b], begin, masked, length, cap, scores,
                    state + 4 * done, state_step,
                )  # fmt: skip
                done += len(full)
            if done < group:
                place = queries + 4 * done * dim
                _absorb(
                    tag, rest, keys, place, dim, block_size, valid[b], begin, masked, length, cap, scores,
                    state + 4 * done, state_step,
                )  # fmt: skip
        for head in range(group):
            mass = get(state + state_step + 4 * head)
            peak = get(state + 4 * head)
            lse[b, h * group + head] = -np.inf if mass == np.float32(0.0) else peak + np.log(mass)
    hold(scratch)


def tail_lse(
    query: Array,
    block_ptr: Array,
    table: Array,
    first_block: int,
    length: int,
    holes: Array,
    valid: Array,
    lse: Array,
    *,
    kv_heads: int,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> Launch:
    """Prepare the exact log-sum-exp of the scores of the tokens from a block on.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        block_ptr: int64 [P], address in bytes of each physical block, a record [Hkv, 2 (K, V), block_size, D].
        table: int32 [B, N], physical block of each logical one.
        first_block: the first logical block.
        length: tokens in every row.
        holes: uint8 [B, N], 1 where a filled token of the block is not valid.
        valid: uint8 [B, T], 1 where the token may be attended.
        lse: float32 [B, Hq], written: natural log; -inf where there is no token.
        kv_heads: KV heads of a record.
        kv_dtype: dtype of the pool: torch.float32, float16 or bfloat16.
        block_size: tokens of a block: 8, 16, 32, 64 or 128.
        scale: factor of the scores.
        softcap: c in score = c * tanh(score / c), or None.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    check_geometry(dim, block_size)
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    require("query", query, F32, (batch, query_heads, dim))
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[-1]))
    require("holes", holes, U8, (batch, holes.shape[-1]))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    require("lse", lse, F32, (batch, query_heads))
    covered = min(valid.shape[1], min(holes.shape[1], table.shape[1]) * block_size)
    if not 0 <= length <= covered or first_block < 0:
        raise ValueError(f"first_block {first_block}, length {length}: table, holes and valid cover {covered} tokens")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap")
    tag = tag_of(kv_dtype)
    tasks = batch * kv_heads
    args = (
        tag, full, rest, query, block_ptr, table, int(first_block), int(length), holes, valid, lse, int(kv_heads),
        int(block_size), float(scale), float(softcap or 0.0),
    )  # fmt: skip
    cost = tasks * max(0, length - first_block * block_size) * dim * tag.itemsize
    return Launch(tail_kernel, tasks, args, new_ticket(), cost)
