"""Sparse decode attention: one query token of each row attends to selected blocks of the host pool.

Shapes: query [B, Hq, D], blocks [B, Hkv, C]; the Hq / Hkv query heads of a KV head share one pass over its blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from references.replaced.parts import (
    NO_KBAR,
    PART_TOKENS,
    PARTS,
    clear_part,
    merge_parts,
    most_part_blocks,
    part_of,
    partial_results,
    partial_state,
)
from references.replaced.record import add_vectors, record_of, score_keys, touch

from hf_offload.cpu.kernels.block import (
    STEP_TOKENS,
    bend_weights,
    clear_scores,
    copy_scores,
    mask_scores,
    scale_weights,
    shrink_sums,
    soften_scores,
    softmax_step,
)
from hf_offload.cpu.kernels.packed import spare_bytes
from hf_offload.cpu.launch import (
    F32,
    I32,
    I64,
    U8,
    Array,
    Launch,
    cap_of,
    check_geometry,
    group_size,
    head_tiles,
    jit,
    kernel,
    require,
    reserve,
    tag_of,
)
from hf_offload.cpu.memory import address_of, count_up, hold
from hf_offload.cpu.simd.vectors import load_f32, splat, store

_NO_SCORES = np.empty((0, 0, 0), np.float32)


@jit
def attend_step(
    tag: Any,
    full: Any,
    rest: Any,
    group: int,
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
    out: int,
    kbar: int,
    raw: int,
    raw_stride: int,
    prefetches: bool,
    packed: Any,
    spare: int,
) -> None:
    """Attend all heads of a group to chosen blocks first..last-1 as one softmax step; prefetch the next step's blocks.

    The register tiles of heads process a block one after the other, while it stays in the first-level cache.
    """
    ahead = last - first
    tokens = (last - first) * block_size
    padded = (tokens + 15) & ~15
    if prefetches:
        for i in range(last, last + ahead):
            touch(tag, addresses[i], dim, block_size, packed)
    for i in range(first, last):
        place = scores + 4 * (i - first) * block_size
        following = addresses[i + ahead] if prefetches else 0
        done = 0
        while done < group:
            at, to = query + 4 * done * dim, place + done * stride
            if done + len(full) <= group:
                score_keys(tag, full, addresses[i], following, at, dim, block_size, to, stride, packed, spare)
                done += len(full)
            else:
                score_keys(tag, rest, addresses[i], following, at, dim, block_size, to, stride, packed, spare)
                done += len(rest)
            following = 0
    if cap > 0.0:
        soften_scores(group, scores, stride, padded, cap)
    clear_scores(group, scores, stride, tokens, padded)
    for i in range(first, last):
        begin = chosen[i] * block_size
        if begin + block_size > length or holes[chosen[i]] != 0:
            place = scores + 4 * (i - first) * block_size
            mask_scores(group, place, stride, valid, begin, length - begin, block_size)
    if raw != 0:
        copy_scores(group, scores, stride, tokens, raw + 4 * first * block_size, raw_stride)
    bent = scores + group * stride
    if cap > 0.0 and kbar != 0:
        bend_weights(group, scores, bent, stride, padded, cap)
    fades = state + 8 * group
    softmax_step(group, scores, stride, padded, state, state + 4 * group, fades)
    shrink_sums(group, out, dim, fades)
    key_weights = scores
    if kbar != 0:
        shrink_sums(group, kbar, dim, fades)
        if cap > 0.0:
            scale_weights(group, bent, scores, stride, padded)
            key_weights = bent
    for part in range(2 if kbar != 0 else 1):  # V, then K; a loop, since a second inlined copy costs compile time
        weights, sums = (scores, out) if part == 0 else (key_weights, kbar)
        for i in range(first, last):
            begin = chosen[i] * block_size
            filled = min(block_size, length - begin)
            masked = filled < block_size or holes[chosen[i]] != 0
            place = weights + 4 * (i - first) * block_size
            following = addresses[i + ahead] if prefetches and part == 0 else 0
            done = 0
            while done < group:
                at, to = place + done * stride, sums + 4 * done * dim
                if done + len(full) <= group:
                    add_vectors(
                        tag, full, addresses[i], part, following, dim, block_size, at, stride, to, valid, begin,
                        filled, masked, packed, spare,
                    )  # fmt: skip
                    done += len(full)
                else:
                    add_vectors(
                        tag, rest, addresses[i], part, following, dim, block_size, at, stride, to, valid, begin,
                        filled, masked, packed, spare,
                    )  # fmt: skip
                    done += len(rest)
                following = 0


@kernel
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
    raw: Array,
    block_size: int,
    scale: float,
    cap: float,
    parts: int,
    partial: Array,
    finished: Array,
    packed: Any,
    prefetches: bool,
) -> None:
    """One task = one part of the blocks of one (row, KV head); the thread that finishes its last part merges them."""
    dim = query.shape[2]
    kv_heads = counts.shape[1]
    group = query.shape[1] // kv_heads
    record = 2 * block_size * dim * tag.itemsize
    step = max(1, STEP_TOKENS // block_size)
    stride = 4 * max(STEP_TOKENS, block_size)
    wants_kbar = kbar.shape[0] > 0
    raw_stride = 4 * raw.shape[2]
    # A partial result: sum of V, sum of K [group, dim] each; peak, mass, fade [group] each.
    part = 4 * group * dim
    state_offset = partial_state(group, dim, wants_kbar)
    partial_step = 4 * partial.shape[1]
    # Scratch: the scaled query; scores and a second set of weights [G, stride]. `addresses`: the chosen blocks, then
    # the first blocks of the next task, which are prefetched.
    scratch = np.empty(16 + (part + 2 * group * stride + spare_bytes(packed, dim, block_size)) // 4, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    scores = queries + part
    spare = scores + 2 * group * stride
    addresses = np.empty(most_part_blocks(blocks.shape[2], parts, block_size, step) + step + 1, np.int64)
    task = count_up(ticket, 0)
    while task < tasks:
        head = task // parts
        b, h = head // kv_heads, head % kv_heads
        begin, mine = part_of(task, parts, block_size, step, counts)
        chosen = blocks[b, h, begin : begin + mine]
        sums = address_of(partial) + task * partial_step
        key_sums = sums + part if wants_kbar else 0
        state = sums + state_offset
        source = address_of(query) + head * part
        raw_scores = address_of(raw) + head * group * raw_stride + 4 * begin * block_size if raw_stride > 0 else 0
        for place in range(0, part, 64):
            store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
        clear_part(sums, dim, group, wants_kbar)
        for i in range(mine):
            addresses[i] = record_of(block_ptr[table[b, chosen[i]]], h, record, packed)
        following, ahead = reserve(ticket, tasks), 0
        if following < tasks:
            start, ahead = part_of(following, parts, block_size, step, counts)
            next_b, next_h = following // parts // kv_heads, following // parts % kv_heads
            ahead = min(ahead, step)
            for i in range(ahead):
                block = blocks[next_b, next_h, start + i]
                addresses[mine + i] = record_of(block_ptr[table[next_b, block]], next_h, record, packed)
        for i in range(mine + ahead, mine + step):
            addresses[i] = addresses[max(i - 1, 0)]
        for first in range(0, mine, step):
            last = min(first + step, mine)
            attend_step(
                tag, full, rest, group, addresses, chosen, first, last, valid[b], holes[b], length, queries, dim,
                block_size, cap, scores, stride, state, sums, key_sums, raw_scores, raw_stride, prefetches,
                packed, spare,
            )  # fmt: skip
        if count_up(finished, head) == parts - 1:
            origin = address_of(partial) + head * parts * partial_step
            merge_parts(
                origin, parts, partial_step, dim, group, wants_kbar, lse[b, h * group : (h + 1) * group],
                address_of(out) + head * part, address_of(kbar) + head * part,
            )  # fmt: skip
        count_up(ticket, 1)
        task = following if following < tasks else count_up(ticket, 0)
    hold(scratch)
    hold(partial)


def check_lists(
    query: Array, block_ptr: Array, table: Array, holes: Array, valid: Array, length: int, out: Array, lse: Array,
    block_size: int,
) -> None:  # fmt: skip
    """Raise unless arguments of `sparse_decode` fit together; lists of pairs have the same."""
    batch, query_heads, dim = query.shape
    check_geometry(dim, block_size)
    require("query", query, F32, (batch, query_heads, dim))
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[-1]))
    require("holes", holes, U8, (batch, holes.shape[-1]))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    require("out", out, F32, query.shape)
    require("lse", lse, F32, (batch, query_heads))
    if min(valid.shape[1], holes.shape[1] * block_size) < length:
        raise ValueError(f"valid {valid.shape} or holes {holes.shape} covers fewer tokens than length {length}")


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
    packed: Any = None,
    prefetch: bool = True,
    scores: Array | None = None,
) -> Launch:
    """Prepare exact softmax attention of one query token of each row over selected blocks.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        block_ptr: int64 [P], address of each physical block, [Hkv] records [2 (K, V), block_size, D], or packed
            ones (see `packed.py`), marked in the lowest bit.
        table: int32 [B, N], physical block of each logical one.
        blocks: int32 [B, Hkv, C], the logical blocks to attend, each at most once; entries from the count on are
            ignored.
        counts: int32 [B, Hkv], number of blocks to attend.
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
        packed: how packed blocks are read (`packed.py`), or None: no block is packed.
        prefetch: whether to prefetch; False measures what prefetching gains.
        scores: float32 [B, Hq, C * block_size] or None, written: the score of each token of the listed blocks as it
            enters the softmax, in the order of the lists; -inf where it is not attended. Entries from the count on are
            not written.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    kv_heads, capacity = blocks.shape[1:]
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    check_lists(query, block_ptr, table, holes, valid, length, out, lse, block_size)
    require("blocks", blocks, I32, (batch, kv_heads, capacity))
    require("counts", counts, I32, (batch, kv_heads))
    if kbar is None:
        kbar = NO_KBAR
    else:
        require("kbar", kbar, F32, query.shape)
    if scores is None:
        scores = _NO_SCORES
    else:
        require("scores", scores, F32, (batch, query_heads, capacity * block_size))
    tag = tag_of(kv_dtype)
    heads, tokens = batch * kv_heads, capacity * block_size
    # The split depends on shapes and counts alone, so that results are the same on any number of threads.
    parts = max(1, min(-(-tokens // PART_TOKENS), PARTS // heads))
    group = query_heads // kv_heads
    partial, finished = partial_results(heads * parts, group, dim, kbar is not NO_KBAR), np.zeros(heads, np.int64)
    args = (
        tag, full, rest, query, block_ptr, table, blocks, counts, holes, valid, int(length), out, lse, kbar, scores,
        int(block_size), float(scale), cap_of(softcap) or 0.0, parts, partial, finished,
        packed, bool(prefetch),
    )  # fmt: skip
    cost = heads * tokens * 2 * dim * tag.itemsize
    return Launch(decode_kernel, heads * parts, args, cost, counters=finished)
