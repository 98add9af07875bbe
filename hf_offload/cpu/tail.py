"""Exact log mass of the newest tokens, those in blocks that have no digest yet."""

from __future__ import annotations

from typing import Any

import numpy as np

from .block import clear_scores, mask_scores, score_block, soften_scores, softmax_step
from .launch import I64, U8, Array, check_geometry, jit, require
from .memory import address_of, get, hold, put
from .vector import NOTHING, load_f32, splat, store


@jit
def _absorb(
    tag: Any, heads: Any, keys: int, query: int, dim: int, block_size: int, valid: Array, begin: int, masked: bool,
    length: int, cap: Any, scores: int, state: int, state_step: int,
) -> None:  # fmt: skip
    """Add one block's tokens to the log-sum-exp of one register tile of heads."""
    count, stride = len(heads), 4 * max(block_size, 16)
    score_block(tag, heads, keys, 0, query, dim, block_size, scores, stride)
    if cap is not None:
        soften_scores(count, scores, stride, block_size, cap)
    clear_scores(count, scores, stride, block_size, stride // 4)
    if masked:
        mask_scores(count, scores, stride, valid, begin, length - begin, block_size)
    softmax_step(count, scores, stride, stride // 4, state, state + state_step, state + 2 * state_step)


@jit
def tail_of_head(
    tag: Any, full: Any, rest: Any, query: Array, block_ptr: Array, table: Array, h: int, kv_heads: int,
    first_block: int, length: int, holes: Array, valid: Array, block_size: int, scale: float, cap: Any, lse: Array,
) -> None:  # fmt: skip
    """Write the log-sum-exp of the scores of the tokens from a block on, for the query heads of KV head h of one row.

    Args:
        query: float32 [G, D].
        block_ptr: int64 [P], address in bytes of each physical block, a record [Hkv, 2 (K, V), block_size, D] in the
            tag's dtype.
        table: int32 [N]; holes: uint8 [N]; valid: uint8 [T], as in `decode.sparse_decode`.
        lse: float32 [G], written: natural log; -inf where there is no token.
    """
    group, dim = query.shape
    part, state_step = 4 * group * dim, 4 * group
    record = 2 * block_size * dim * tag.itemsize
    scratch = np.empty((part + 3 * state_step) // 4 + 4 * max(block_size, 16), np.float32)
    queries = address_of(scratch)
    state = queries + part
    scores = state + 3 * state_step
    for place in range(0, part, 64):
        store(queries + place, load_f32(address_of(query) + place) * splat(np.float32(scale)))
    for head in range(group):
        put(state + 4 * head, NOTHING)
        put(state + state_step + 4 * head, np.float32(0.0))
    for n in range(first_block, (length + block_size - 1) // block_size):
        keys = block_ptr[table[n]] + h * record
        begin = n * block_size
        masked = holes[n] != 0 or begin + block_size > length
        done = 0
        while done < group:
            place, place_state = queries + 4 * done * dim, state + 4 * done
            if done + len(full) <= group:
                _absorb(
                    tag, full, keys, place, dim, block_size, valid, begin, masked, length, cap, scores, place_state,
                    state_step,
                )  # fmt: skip
                done += len(full)
            else:
                _absorb(
                    tag, rest, keys, place, dim, block_size, valid, begin, masked, length, cap, scores, place_state,
                    state_step,
                )  # fmt: skip
                done += len(rest)
    for head in range(group):
        mass = get(state + state_step + 4 * head)
        peak = get(state + 4 * head)
        lse[head] = -np.inf if mass == np.float32(0.0) else peak + np.log(mass)
    hold(scratch)
    hold(query)


def check_tail(
    block_ptr: Array, holes: Array, valid: Array, table: Array, dim: int, first_block: int, length: int,
    block_size: int,
) -> None:  # fmt: skip
    """Raise unless the arrays cover `length` tokens from a block on."""
    check_geometry(dim, block_size)
    batch = table.shape[0]
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("holes", holes, U8, (batch, holes.shape[-1]))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    covered = min(valid.shape[1], min(holes.shape[1], table.shape[1]) * block_size)
    if not 0 <= length <= covered or first_block < 0:
        raise ValueError(f"first_block {first_block}, length {length}: table, holes and valid cover {covered} tokens")
