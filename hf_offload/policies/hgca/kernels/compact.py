"""Per-head selection of tokens by threshold, and the copy of their keys and values into contiguous lists.

Source: HGCA, algorithm 1, lines 19-24; section 3.3, "CPU-local sparse attention".
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from hf_offload.cpu.kernels.move_records import layout_of
from hf_offload.cpu.launch import (
    BLOCK_SIZES,
    F32,
    I32,
    I64,
    U8,
    Array,
    Launch,
    group_size,
    jit,
    kernel,
    require,
    tag_of,
)
from hf_offload.cpu.memory import address_of, copy_bytes, count_up, next_task
from hf_offload.cpu.simd.convert import load_first, load_marks, store_marks
from hf_offload.cpu.simd.vectors import choose_less, lane_sum, splat, vmax

Rule = Literal["any", "mean"]
"""How the averages of a group's query heads are joined: their largest, or their mean."""
_RULES = ("any", "mean")


@jit
def _mark(
    average: int, step: int, group: int, largest: bool, valid: int, threshold: float, kept: int, tokens: int
) -> int:
    """Write which of `tokens` tokens are kept; return how many.

    Args:
        average: address of the averages of a group's first query head; those of the others are `step` bytes apart.
        valid, kept: addresses of bytes.
    """
    zero, one, bar = splat(np.float32(0.0)), splat(np.float32(1.0)), splat(np.float32(threshold))
    part, total = splat(np.float32(1.0) / np.float32(group)), zero
    for token in range(0, tokens, 16):
        count = tokens - token
        joined = load_first(average + 4 * token, count)
        for g in range(1, group):
            other = load_first(average + g * step + 4 * token, count)
            joined = vmax(joined, other) if largest else joined + other
        if not largest:
            joined = joined * part
        flags = choose_less(bar, joined, one, zero)
        flags = choose_less(zero, load_marks(valid + token, count), flags, zero)
        store_marks(kept + token, count, flags)
        total = total + flags
    return int(lane_sum(total))


@kernel
def mark_kernel(
    ticket: Array, tasks: int, average: Array, valid: Array, thresholds: Any, border: int, first: int, stop: int,
    kept: Array, counts: Array, largest: bool,
) -> None:  # fmt: skip
    """One task = one (row, KV head)."""
    kv_heads, (old, new) = counts.shape[1], thresholds
    group, step = average.shape[1] // kv_heads, 4 * average.shape[2]
    middle = min(max(border, first), stop)
    task = count_up(ticket, 0)
    while task < tasks:
        b, h = task // kv_heads, task % kv_heads
        found = 0
        for part in range(2):
            begin, end = (first, middle) if part == 0 else (middle, stop)
            found += _mark(
                address_of(average) + task * group * step + 4 * begin, step, group, largest,
                address_of(valid) + b * valid.shape[1] + begin, old[b] if part == 0 else new[b],
                address_of(kept) + task * kept.shape[2] + begin, end - begin,
            )  # fmt: skip
        counts[b, h] = found
        task = next_task(ticket)


class _Lists(NamedTuple):
    """Lists of tokens, as `compact_tokens` takes them; `row`: bytes of a token's key."""

    block_ptr: Array
    table: Array
    begin: Array
    positions: Array
    block_size: int
    row: int


@kernel
def compact_kernel(
    ticket: Array, tasks: int, keys: Any, values: Any, tokens: int, kept: Array, first: int, lists: Any
) -> None:
    """One task = one list; keys and values: address and strides of [B, Hkv, tokens], in bytes."""
    kv_heads, block_ptr, table, size, row = kept.shape[1], lists.block_ptr, lists.table, lists.block_size, lists.row
    (key_at, key_strides), (value_at, value_strides) = keys, values
    task = count_up(ticket, 0)
    while task < tasks:
        b, h = task // kv_heads, task % kv_heads
        key = key_at + b * key_strides[0] + h * key_strides[1]
        value = value_at + b * value_strides[0] + h * value_strides[1]
        entry = lists.begin[task]
        for i in range(tokens):
            token = first + i
            if kept[b, h, token] != 0:
                place = block_ptr[table[task, entry // size]] + entry % size * row
                copy_bytes(place, key + i * key_strides[2], row)
                copy_bytes(place + size * row, value + i * value_strides[2], row)
                lists.positions[task, entry] = token
                entry += 1
        task = next_task(ticket)


def mark_retained(
    average: Array, valid: Array, threshold_old: Array, threshold_new: Array, border: int, first: int, stop: int,
    kept: Array, counts: Array, *, kv_heads: int, rule: Rule,
) -> Launch:  # fmt: skip
    """Prepare deciding which of the tokens first..stop-1 each KV head keeps.

    It keeps the valid ones whose average, joined over the head's query heads, is above the row's threshold.

    Args:
        average: float32 [B, Hq, T], finite where a token is valid.
        valid: uint8 [B, T'], T' at least `stop`.
        threshold_old: float32 [B], for tokens before `border`; -inf keeps every valid token.
        threshold_new: float32 [B], for the others.
        border: a token.
        first, stop: the first token and the one after the last.
        kept: uint8 [B, Hkv, T''], T'' at least `stop`, written: 1 or 0 at the tokens.
        counts: int64 [B, Hkv], written: how many are kept.
        kv_heads: how many.
        rule: how averages of a group's query heads are joined: "any" takes the largest, "mean" the mean.

    Raises:
        ValueError: shapes that contradict each other, an unknown rule, or a memory layout that the kernel does not
            cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, capacity = average.shape
    if rule not in _RULES:
        raise ValueError(f"rule {rule!r} is not one of {_RULES}")
    group_size(query_heads, kv_heads)
    require("average", average, F32, average.shape)
    require("valid", valid, U8, (batch, valid.shape[-1]))
    require("threshold_old", threshold_old, F32, (batch,))
    require("threshold_new", threshold_new, F32, (batch,))
    require("kept", kept, U8, (batch, kv_heads, kept.shape[-1]))
    require("counts", counts, I64, (batch, kv_heads))
    covered = min(capacity, valid.shape[1], kept.shape[2])
    if not 0 <= first <= stop <= covered:
        raise ValueError(f"tokens {first}..{stop}: average, valid and kept cover {covered}")
    args = (
        average,
        valid,
        (threshold_old, threshold_new),
        int(border),
        int(first),
        int(stop),
        kept,
        counts,
        rule == "any",
    )
    return Launch(mark_kernel, batch * kv_heads, args, 4 * batch * query_heads * (stop - first))


def compact_tokens(
    k: Array | torch.Tensor, v: Array | torch.Tensor, kept: Array, first: int, block_ptr: Array, table: Array,
    begin: Array, positions: Array, *, block_size: int, kv_dtype: torch.dtype,
) -> Launch:  # fmt: skip
    """Prepare appending the kept ones of t tokens to the list of each row and KV head, in ascending order.

    List i is that of row i // Hkv and KV head i % Hkv. Its entry e lies in record block_ptr[table[i, e // block_size]],
    [2 (K, V), block_size, D], at e % block_size.

    Args:
        k: [B, Hkv, t, D] CPU tensor of kv_dtype, or array of its bits, of tokens from `first` on; last dimension
            contiguous, other strides free.
        v: the same for the values.
        kept: uint8 [B, Hkv, T], from `mark_retained`; does not change before the launch is made.
        first: the first token.
        block_ptr: int64 [P], address in bytes of each physical block of one KV head.
        table: int32 [B * Hkv, N], physical block of each of a list's blocks.
        begin: int64 [B * Hkv], entries that each list has.
        positions: int32 [B * Hkv, E], written: the entry's token.
        block_size: tokens of a block.
        kv_dtype: dtype of the pool.

    Raises:
        ValueError: shapes that contradict each other, lists that would not fit, or what the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, kv_heads, tokens, dim = k.shape
    size, lists = tag_of(kv_dtype).itemsize, batch * kv_heads
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"k is {k.dtype} {k.shape} but v is {v.dtype} {v.shape}; they must agree")
    key, key_strides, itemsize = layout_of(k)
    value, value_strides, _ = layout_of(v)
    if itemsize != size or (isinstance(k, torch.Tensor) and k.dtype != kv_dtype):
        raise TypeError(f"k and v are {k.dtype}; the pool holds {kv_dtype}")
    if dim > 1 and (key_strides[3] != size or value_strides[3] != size):
        raise ValueError("k and v need a contiguous last dimension")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size} is not one of {BLOCK_SIZES}")
    require("kept", kept, U8, (batch, kv_heads, kept.shape[-1]))
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (lists, table.shape[-1]))
    require("begin", begin, I64, (lists,))
    require("positions", positions, I32, (lists, positions.shape[-1]))
    if not 0 <= first <= kept.shape[2] - tokens:
        raise ValueError(f"tokens {first}..{first + tokens}: kept covers {kept.shape[2]}")
    counts = np.count_nonzero(kept[..., first : first + tokens], axis=-1).reshape(lists)
    room = min(table.shape[1] * block_size, positions.shape[1])
    longest = int((begin + counts).max(initial=0))
    if longest > room or begin.min(initial=0) < 0:
        raise ValueError(
            f"lists of {longest} entries, from {begin} on: table and positions hold {room}; map more blocks"
        )
    into = _Lists(block_ptr, table, begin, positions, int(block_size), dim * size)
    args = ((key, key_strides[:3]), (value, value_strides[:3]), tokens, kept, int(first), into)
    cost = 2 * int(counts.sum()) * dim * size + lists * tokens
    return Launch(compact_kernel, lists, args, cost, (k, v))
