"""Decode attention to listed pairs of tokens, each with a weight: one query token of each row.

A pair is the tokens 2 · j and 2 · j + 1, which lie side by side in their block. The log weight is added to both scores.
Otherwise as `sparse_decode.py`: parts, softmax steps and their merge.

Drawn pairs, those with a weight w above 0, also tell how far the softmax's sum Z may be off. A pair is drawn with
probability x = exp(-w), and y is what it adds to Z. In Poisson sampling Σ (1 - x) y² estimates the variance of Σ y
without bias (Horvitz and Thompson 1952). Thresholds that are spread evenly leave about three quarters of it:

    error = sqrt(3/4 · Σ (1 - x) y²) / Z
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from references.replaced.block_decode import check_lists
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
from references.replaced.record import record_of

from hf_offload.cpu.kernels.block import (
    bend_weights,
    clear_scores,
    scale_weights,
    shrink_sums,
    soften_scores,
    softmax_step,
)
from hf_offload.cpu.kernels.packed import (
    add_packed_pairs,
    fetch_pair,
    is_packed,
    score_packed_pairs,
    spare_bytes,
)
from hf_offload.cpu.launch import (
    F32,
    I32,
    I64,
    U8,
    Array,
    Launch,
    cap_of,
    group_size,
    head_tiles,
    jit,
    kernel,
    require,
    reserve,
    tag_of,
)
from hf_offload.cpu.memory import LINE, add_to, address_of, count_up, get, hold, prefetch, put, put_word
from hf_offload.cpu.simd.register_tiles import (
    dot_quad,
    load_columns,
    load_tile,
    outer_fma,
    spread,
    store_quads,
    store_tile,
)
from hf_offload.cpu.simd.vectors import (
    MASKED,
    NOTHING,
    choose_less,
    exp,
    fma,
    lane_sum,
    load_f32,
    lowest_bit,
    run_totals,
    splat,
    store,
)

STEP = 64  # pairs of a softmax step
ERROR_BINS, ERROR_STEPS, LEAST_ERROR = 96, 4, -20
"""A tally counts errors in bins, `ERROR_STEPS` an octave, from 2 ** LEAST_ERROR on."""
_PAIR = (0, 0)
_EVEN = 0.75  # SmolLM2, 6k: 2 true errors of 3 are below the estimate, as of a normal distribution
_NO_MARKS = np.empty((0, 0, 0), np.uint8)


@jit
def _fetch(row: int, size: int) -> None:
    """Prefetch the keys or the values of a pair."""
    for line in range(0, size, LINE):
        prefetch(row + line, 2)


@jit
def _score_rows(
    tag: Any, heads: Any, keys: Array, places: Array, first: int, tokens: int, end: int, query: int, dim: int,
    block_size: int, scores: int, stride: int, packed: Any,
) -> None:  # fmt: skip
    """scores[head, token] = query[head] · the key of first + token in the lists; prefetch as many behind, before `end`.

    Lists as in `attend_rows`.
    """
    if packed is not None:
        score_packed_pairs(packed, heads, keys, places, first, tokens, end, query, dim, block_size, scores, stride)
        return
    size = 2 * dim * tag.itemsize
    for at in range(first, first + tokens, 4):
        if at + tokens + 4 <= end:
            _fetch(keys[at + tokens], size)
            _fetch(keys[at + tokens + 2], size)
        sums = dot_quad(tag, heads, (keys[at], keys[at + 1], keys[at + 2], keys[at + 3]), query, dim)
        store_quads(scores + 4 * (at - first), stride, heads, sums)


@jit
def _add_rows(
    tag: Any, heads: Any, part: int, rows: Array, places: Array, first: int, tokens: int, end: int, dim: int,
    block_size: int, weights: int, stride: int, sums: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """sums[head] += weights[head, token] · the value (part 0) or key (1); prefetch as `_score_rows` does."""
    if packed is not None:
        add_packed_pairs(
            packed, heads, part, rows, places, first, tokens, dim, block_size, weights, stride, sums, spare
        )  # fmt: skip
        return
    wide, share = dim - dim % 64, 64 * tag.itemsize
    for d in range(0, wide, 64):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 4)
        for at in range(first, first + tokens):
            if at + tokens < end:
                _fetch(rows[at + tokens] + d * tag.itemsize, share)
            columns = load_columns(tag, rows[at] + d * tag.itemsize, 4)
            tile = outer_fma(tile, columns, spread(weights + 4 * (at - first), stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)
    for d in range(wide, dim, 16):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 1)
        for at in range(first, first + tokens):
            columns = load_columns(tag, rows[at] + d * tag.itemsize, 1)
            tile = outer_fma(tile, columns, spread(weights + 4 * (at - first), stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)


@jit
def _rows_of(
    pair: int, block_ptr: Array, table: Array, h: int, block_size: int, line: int, holes: Array, length: int,
    packed: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """A pair's first token, the addresses of its key and value, and whether the two tokens must be checked.

    In place of the addresses, where blocks are packed: the address of the record, and the token's number in it.
    """
    token = 2 * np.int64(pair)
    block, offset = token >> lowest_bit(block_size), token & (block_size - 1)  # quicker than a division
    place = record_of(block_ptr[table[block]], h, 2 * block_size * line, packed)
    checked = holes[block] != 0 or token + 2 > length
    if packed is not None:
        return token, place, offset, checked
    key = place + offset * line
    return token, key, key + block_size * line, checked


@jit
def _add_all(
    tag: Any, full: Any, rest: Any, group: int, part: int, rows: Array, places: Array, first: int, tokens: int,
    end: int, dim: int, block_size: int, weights: int, stride: int, sums: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """`_add_rows` for all heads of a group."""
    done = 0
    while done < group:
        at, to, until = weights + done * stride, sums + 4 * done * dim, end if done == 0 else 0
        if done + len(full) <= group:
            _add_rows(
                tag, full, part, rows, places, first, tokens, until, dim, block_size, at, stride, to, packed, spare
            )  # fmt: skip
            done += len(full)
        else:
            _add_rows(
                tag, rest, part, rows, places, first, tokens, until, dim, block_size, at, stride, to, packed, spare
            )  # fmt: skip
            done += len(rest)


@jit
def _add_drawn(group: int, weights: int, stride: int, pairs: int, drawn: int, fades: int, sums: int) -> None:
    """Add a step's drawn pairs to Σ (1 - x) y² [G] at `sums`, relative to the heads' peaks.

    Args:
        weights: address of the step's softmax weights, 0 up to a multiple of 32 tokens.
        drawn: address of float32, 1 - x of each pair.
        fades: address of what multiplies earlier weights [G].
    """
    for g in range(group):
        square = splat(np.float32(0.0))
        for i in range(0, pairs, 16):
            y = run_totals(weights + g * stride + 8 * i, _PAIR)
            square = fma(y * y, load_f32(drawn + 4 * i), square)
        fade, place = get(fades + 4 * g), sums + 4 * g
        put(place, get(place) * fade * fade + lane_sum(square))


@jit
def attend_rows(
    tag: Any, full: Any, rest: Any, group: int, keys: Array, values: Array, places: Array, added: Array, drawn: Array,
    first: int, tokens: int, end: int, query: int, dim: int, block_size: int, cap: float, scores: int, state: int,
    sums: int, kbar: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """Attend the tokens first..first+tokens-1 of the lists as one softmax step; prefetch as many behind, before `end`.

    Args:
        keys, values: int64, the tokens' addresses. With `packed` all are packed: those of their records, and `places`,
            int64, are their numbers in these.
        added: float32, what is added to the scores, MASKED: the token is not attended.
        drawn: float32, by pairs, as for `_add_drawn`.
        query: address of the scaled queries [G, D].
        scores: address of scratch float32 [2, G, 2 · STEP].
        state: peaks, masses, fades and Σ (1 - x) y² [G] each.
        sums: float32 [G, D]; kbar: the same of keys, 0: not wanted.
    """
    stride, padded = 8 * STEP, (tokens + 31) & ~31
    nothing, none = splat(NOTHING), splat(MASKED)
    done = 0
    while done < group:
        at, to, until = query + 4 * done * dim, scores + done * stride, end if done == 0 else 0
        if done + len(full) <= group:
            _score_rows(tag, full, keys, places, first, tokens, until, at, dim, block_size, to, stride, packed)
            done += len(full)
        else:
            _score_rows(tag, rest, keys, places, first, tokens, until, at, dim, block_size, to, stride, packed)
            done += len(rest)
    bent = scores + group * stride
    if cap > 0.0:
        soften_scores(group, scores, stride, padded, cap)
        if kbar != 0:
            bend_weights(group, scores, bent, stride, padded, cap)
    for g in range(group):
        for i in range(0, padded, 16):
            more, place = load_f32(address_of(added) + 4 * (first + i)), scores + g * stride + 4 * i
            store(place, choose_less(more, nothing, none, load_f32(place) + more))
    clear_scores(group, scores, stride, tokens, padded)
    fades = state + 8 * group
    softmax_step(group, scores, stride, padded, state, state + 4 * group, fades)
    _add_drawn(group, scores, stride, padded // 2, address_of(drawn) + 2 * first, fades, state + 12 * group)
    shrink_sums(group, sums, dim, fades)
    key_weights = scores
    if kbar != 0:
        shrink_sums(group, kbar, dim, fades)
        if cap > 0.0:
            scale_weights(group, bent, scores, stride, padded)
            key_weights = bent
    for part in range(2 if kbar != 0 else 1):  # V, then K; a loop, since a second inlined copy costs compile time
        rows, at, to = (values, scores, sums) if part == 0 else (keys, key_weights, kbar)
        _add_all(
            tag, full, rest, group, part, rows, places, first, tokens, end if part == 0 else 0, dim, block_size, at,
            stride, to, packed, spare,
        )  # fmt: skip


@jit
def _errors(
    first: int, rows: int, step: int, group: int, state: int, portion: Array, errors: Array, tally: Array
) -> None:  # fmt: skip
    """Write the heads' errors [G] from `rows` merged parts, and count them (see the module's description).

    Args:
        first, step: address of the first part's result and their distance; state: offset of the peaks in each.
        portion: [G], as in `attend_pairs`.
    """
    for g in range(group):
        square = 0.0
        for row in range(rows):
            at = first + row * step + state + 4 * g
            share = np.float64(get(at + 8 * group))
            square += share * share * get(at + 12 * group)
        error = math.sqrt(_EVEN * square) * portion[g]
        errors[g] = error
        if error < 1e3:  # not NaN
            octaves = math.log2(error) - LEAST_ERROR if error > 0.0 else 0.0
            number: Any = min(max(np.int64(octaves * ERROR_STEPS), 0), ERROR_BINS - 1)
            add_to(tally, 0, 1)
            add_to(tally, 1, np.int64(error * 2.0**32))
            add_to(tally, 2 + number, 1)


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
    skipped: Array,
    length: int,
    out: Array,
    lse: Array,
    kbar: Array,
    portion: Array,
    errors: Array,
    tally: Array,
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
    wants_kbar, skips = kbar.shape[0] > 0, skipped.shape[0] > 0
    part, partial_step = 4 * group * dim, 4 * partial.shape[1]
    state_offset = partial_state(group, dim, wants_kbar)
    most = 2 * (most_part_blocks(pairs.shape[2], parts, 2, STEP) + 2 * STEP)
    keys, values, added = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most + 32, np.float32)
    places, drawn = np.empty(0 if packed is None else most, np.int64), np.zeros(most // 2 + 16, np.float32)
    # Scratch: the scaled query, the scores of a step twice, a row of zeros, and what packed rows need.
    size = 64 + part + 16 * STEP * group + 4 * dim + spare_bytes(packed, dim, block_size)
    scratch = np.empty(size // 4 + 16, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    scores = queries + part
    zero = scores + 16 * STEP * group
    spare = zero + 4 * dim
    for d in range(0, 4 * dim, 64):
        store(zero + d, splat(np.float32(0.0)))
    task = count_up(ticket, 0)
    while task < tasks:
        head = task // parts
        b, h = head // kv_heads, head % kv_heads
        begin, mine = part_of(task, parts, 2, STEP, counts)
        sums = address_of(partial) + task * partial_step
        key_sums = sums + part if wants_kbar else 0
        state = sums + state_offset
        source = address_of(query) + head * part
        for place in range(0, part, 64):
            store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
        clear_part(sums, dim, group, wants_kbar)
        for i in range(group):
            put(state + 12 * group + 4 * i, np.float32(0.0))
        front, back = 0, mine  # packed pairs come first in the lists: the rows of a step are of one kind
        for i in range(mine):
            weight = weights[b, h, begin + i]
            token, key, value, checked = _rows_of(
                pairs[b, h, begin + i], block_ptr, table[b], h, block_size, line, holes[b], length, packed
            )
            at, step = 2 * i, line
            if packed is not None:
                if is_packed(key):
                    at, step, front = 2 * front, 0, front + 1
                    places[at], places[at + 1] = value, value + 1
                    if i < STEP:
                        fetch_pair(packed, key - 1, value, dim, block_size)
                    value = key
                else:
                    back -= 1
                    at, key, value = 2 * back, key + value * line, key + (block_size + value) * line
            drawn[at // 2] = -weight
            for j in range(2):
                added[at + j], keys[at + j], values[at + j] = weight, key + j * step, value + j * step
                if (checked or skips) and (
                    token + j >= length or valid[b, token + j] == 0 or (skips and skipped[b, h, token + j] != 0)
                ):
                    added[at + j] = MASKED
                    if step != 0:  # packed tokens are finite
                        keys[at + j] = values[at + j] = zero
            if packed is None and i < STEP:
                _fetch(keys[2 * i], 2 * line)
                _fetch(values[2 * i], 2 * line)
        for i in range(0, 4 * mine, 64):
            store(address_of(drawn) + i, splat(np.float32(1.0)) - exp(load_f32(address_of(drawn) + i)))
        for at in range(2 * mine, 2 * (mine + STEP)):  # is scored, or prefetched, and not attended
            put_word(address_of(keys) + 8 * at, zero)
            put_word(address_of(values) + 8 * at, zero)
        following = reserve(ticket, tasks)
        if packed is None and following < tasks and mine > 0:  # the last step prefetches the next part's first pairs
            start, ahead = part_of(following, parts, 2, STEP, counts)
            next_b, next_h = following // parts // kv_heads, following // parts % kv_heads
            for i in range(min(ahead, STEP)):
                _, key, value, _ = _rows_of(
                    pairs[next_b, next_h, start + i], block_ptr, table[next_b], next_h, block_size, line,
                    holes[next_b], length, packed,
                )  # fmt: skip
                for j in range(2):
                    at = 2 * (mine + i) + j
                    keys[at], values[at] = key + j * line, value + j * line
        if packed is not None:
            for first in range(0, 2 * front, 2 * STEP):
                attend_rows(
                    tag, full, rest, group, keys, values, places, added, drawn, first, min(2 * STEP, 2 * front - first),
                    2 * front, queries, dim, block_size, cap, scores, state, sums, key_sums, packed, spare,
                )  # fmt: skip
        for first in range(2 * front, 2 * mine, 2 * STEP):
            attend_rows(
                tag, full, rest, group, keys, values, places, added, drawn, first, min(2 * STEP, 2 * mine - first),
                len(keys), queries, dim, block_size, cap, scores, state, sums, key_sums, None, spare,
            )  # fmt: skip
        if count_up(finished, head) == parts - 1:
            origin, heads = address_of(partial) + head * parts * partial_step, slice(h * group, (h + 1) * group)
            merge_parts(
                origin, parts, partial_step, dim, group, wants_kbar, lse[b, heads], address_of(out) + head * part,
                address_of(kbar) + head * part,
            )  # fmt: skip
            _errors(origin, parts, partial_step, group, state_offset, portion[b, heads], errors[b, heads], tally)
        count_up(ticket, 1)
        task = following if following < tasks else count_up(ticket, 0)
    hold(scratch)
    hold(keys)
    hold(values)
    hold(added)
    hold(drawn)
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
    kbar: Array | None,
    *,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
    packed: Any = None,
    skipped: Array | None = None,
    portion: Array | None = None,
    errors: Array | None = None,
    tally: Array | None = None,
) -> Launch:
    """Prepare softmax attention of one query token of each row to listed pairs.

    Args:
        pairs, weights, counts: a `draw_pairs.PairLists`, each pair at most once; entries from the count on are ignored.
            Weights are added to both scores of a pair, after the softcap; above 0: the pair is drawn.
        query, block_ptr, table, holes, valid, length, out, lse, kbar, kv_dtype, block_size, scale, softcap, packed: as
            in `sparse_decode`.
        skipped: uint8 [B, Hkv, T], 1 for tokens that are not attended; None: all are.
        portion: float32 [B, Hq], the share of a head's attention that the listed pairs stand for; None: all of it.
        errors: float32 [B, Hq] or None, written: the estimated standard error of the sum of exp(score) of all keys, as
            a share of that sum.
        tally: int64 [2 + ERROR_BINS] or None: added to it are the number of errors, their sum in units of 2 ** -32, and
            how many there are in each bin.

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
    if kbar is None:
        kbar = NO_KBAR
    else:
        require("kbar", kbar, F32, query.shape)
    skipped = _NO_MARKS if skipped is None else skipped
    if len(skipped):
        require("skipped", skipped, U8, (batch, kv_heads, skipped.shape[-1]))
        if skipped.shape[2] < length:
            raise ValueError(f"skipped {skipped.shape} covers fewer tokens than length {length}")
    portion = np.ones((batch, query_heads), np.float32) if portion is None else portion
    errors = np.empty((batch, query_heads), np.float32) if errors is None else errors
    tally = np.zeros(2 + ERROR_BINS, np.int64) if tally is None else tally
    require("portion", portion, F32, (batch, query_heads))
    require("errors", errors, F32, (batch, query_heads))
    require("tally", tally, I64, (2 + ERROR_BINS,))
    tag = tag_of(kv_dtype)
    heads = batch * kv_heads
    parts = max(1, min(-(-2 * room // PART_TOKENS), PARTS // heads))  # of shapes alone, as in `sparse_decode`
    partial = partial_results(heads * parts, query_heads // kv_heads, dim, kbar is not NO_KBAR, 1)
    finished = np.zeros(heads, np.int64)
    args = (
        tag, full, rest, query, block_ptr, table, pairs, weights, counts, holes, valid, skipped, int(length), out, lse,
        kbar, portion, errors, tally, int(block_size), float(scale), cap_of(softcap) or 0.0, parts, partial, finished,
        packed,
    )  # fmt: skip
    return Launch(pair_kernel, heads * parts, args, heads * 2 * room * 2 * dim * tag.itemsize, counters=finished)
