"""Decode attention on the CPU: one query token of each row attends to listed blocks, or to listed pairs of tokens.

Shapes: query [B, Hq, D], lists [B, Hkv, C]; the Hq / Hkv query heads of a KV head share one pass over its tokens. A
list is cut into parts, a part into softmax steps of up to `STEP_TOKENS` tokens. How a step finds its tokens is chosen
when the kernel is compiled: a block has an address, a pair one for its keys and one for its values.

A pair is the tokens 2 · j and 2 · j + 1, which lie side by side in their block. Its log weight is added to both scores,
after the softcap. Drawn pairs, those with a weight w above 0, also tell how far the softmax's sum Z may be off. A pair
is drawn with probability x = exp(-w), and y is what it adds to Z. In Poisson sampling Σ (1 - x) y² estimates the
variance of Σ y without bias (Horvitz and Thompson 1952). Thresholds that are spread evenly leave about three quarters
of it:

    error = sqrt(3/4 · Σ (1 - x) y²) / Z
"""

from __future__ import annotations

import math
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

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
from hf_offload.cpu.kernels.packed import (
    add_packed_pairs,
    fetch_pair,
    is_packed,
    score_packed_pairs,
    spare_bytes,
)
from hf_offload.cpu.kernels.parts import (
    PART_TOKENS,
    PARTS,
    clear_part,
    merge_parts,
    most_part_items,
    part_of,
    partial_results,
    partial_state,
)
from hf_offload.cpu.kernels.record import HostBlocks, add_vectors, record_of, score_keys, touch
from hf_offload.cpu.launch import (
    F32,
    I32,
    I64,
    U8,
    Array,
    Launch,
    borrowing,
    by_class,
    by_tiles,
    cap_of,
    group_size,
    head_tiles,
    jit,
    kernel,
    require,
    reserve,
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

STRIDE = 4 * STEP_TOKENS
"""Bytes between the scores of two heads of a step."""
ERROR_BINS, ERROR_STEPS, LEAST_ERROR = 96, 4, -20
"""A tally counts errors in bins, `ERROR_STEPS` an octave, from 2 ** LEAST_ERROR on."""
_PAIR = (0, 0)
_EVEN = 0.75  # SmolLM2, 6k: 2 true errors of 3 are below the estimate, as of a normal distribution
_NO_MARKS = np.empty((0, 0, 0), np.uint8)


class Pairs(NamedTuple):
    """What a list of pairs has besides their numbers, and what drawn pairs tell.

    Args:
        weights: float32 [B, Hkv, C], added to both scores of a pair; above 0: the pair is drawn.
        skipped: uint8 [B, Hkv, T], 1 for tokens that are not attended; [0, 0, 0]: all are.
        portion: float32 [B, Hq], the share of a head's attention that the listed pairs stand for.
        errors: float32 [B, Hq], written: the estimated standard error of the sum of exp(score) of all keys, as a share
            of that sum.
        tally: int64 [2 + ERROR_BINS]; added to it are the number of errors, their sum in units of 2 ** -32, and how
            many there are in each bin.
    """

    weights: Array
    skipped: Array
    portion: Array
    errors: Array
    tally: Array

    @classmethod
    def of(
        cls,
        weights: Array,
        query_heads: int,
        *,
        skipped: Array | None = None,
        portion: Array | None = None,
        errors: Array | None = None,
        tally: Array | None = None,
    ) -> Pairs:
        """Pairs of these weights; by default all tokens are attended, and the pairs stand for all of the attention."""
        heads = len(weights), query_heads
        return cls(
            weights,
            _NO_MARKS if skipped is None else skipped,
            np.ones(heads, np.float32) if portion is None else portion,
            np.empty(heads, np.float32) if errors is None else errors,
            np.zeros(2 + ERROR_BINS, np.int64) if tally is None else tally,
        )

    def check(self, shape: tuple[int, int, int], query_heads: int, length: int) -> None:
        """Raise unless the arrays fit lists `[B, Hkv, C]` and rows of `length` tokens."""
        heads = shape[0], query_heads
        require("weights", self.weights, F32, shape)
        if len(self.skipped):
            require("skipped", self.skipped, U8, (*shape[:2], self.skipped.shape[-1]))
            if self.skipped.shape[2] < length:
                raise ValueError(f"skipped {self.skipped.shape} covers fewer tokens than length {length}")
        require("portion", self.portion, F32, heads)
        require("errors", self.errors, F32, heads)
        require("tally", self.tally, I64, (2 + ERROR_BINS,))


class Attention(NamedTuple):
    """Arguments of `attend_part` that all parts of a launch share; `decode_attention` describes them.

    query, out, kbar, scores and partial are addresses; kbar, scores 0: not wanted. `form` has the sizes.
    """

    blocks: Any
    items: Array
    counts: Array
    pairs: Any
    lse: Array
    form: Any
    scale: float
    query: int
    out: int
    kbar: int
    scores: int
    partial: int
    step: int  # bytes of a partial result
    parts: int


class BlockRows(NamedTuple):
    """The tokens of a part's blocks.

    Args:
        keys: int64, addresses of the records.
        chosen: int32, the blocks' numbers.
        holes, valid: of the row, as in `HostBlocks`.
        length: tokens of the row.
    """

    keys: Array
    chosen: Array
    holes: Array
    valid: Array
    length: int


class PairRows(NamedTuple):
    """The tokens of a part's pairs, two entries a pair. Packed ones come first: a step's are of one kind.

    Args:
        keys, values: int64, addresses of the tokens' keys and values. Packed: of their record, marked.
        tokens: int64, packed tokens' numbers in their record.
        added: float32, what is added to the scores; MASKED: the token is not attended.
        drawn: float32, by pairs: 1 - x.
    """

    keys: Array
    values: Array
    tokens: Array
    added: Array
    drawn: Array


class Scratch(NamedTuple):
    """Addresses of one thread's memory.

    Args:
        queries: the scaled queries [G, D].
        scores: a step's scores [2, G, STEP_TOKENS]: scores or weights, and weights times the cap's slope.
        zero: a row of zeros.
        spare: what packed records need.
    """

    queries: int
    scores: int
    zero: int
    spare: int


class Form(NamedTuple):
    """Sizes: query heads of a KV head, head dimension, tokens of a block and of an item; and the softcap, or 0."""

    group: int
    dim: int
    block_size: int
    unit: int
    cap: float


class Target(NamedTuple):
    """Addresses of a part's result.

    Args:
        sums, kbar: weighted sums of values and of keys [G, D]; kbar 0: not wanted.
        state: peaks, masses, fades and Σ (1 - x) y² [G] each.
        raw, raw_stride: where a part's scores go, and bytes between two heads' there; raw 0: not wanted.
    """

    sums: int
    kbar: int
    state: int
    raw: int
    raw_stride: int


# --- steps of blocks -------------------------------------------------------------------------------------------------


_score_record, _add_record = by_tiles(score_keys), by_tiles(add_vectors)


def _score_blocks(
    rows: Any, tag: Any, full: Any, rest: Any, form: Any, first: int, last: int, end: int, scratch: Any, packed: Any
) -> None:  # fmt: skip
    """Scores of chosen blocks first..last-1; prefetch as many that follow.

    The register tiles of heads process a block one after the other, while it stays in the first-level cache.
    """
    ahead = last - first
    for i in range(last, last + ahead):
        touch(tag, rows.keys[i], form.dim, form.block_size, packed)
    for i in range(first, last):
        _score_record(
            full, rest, form.group, tag, rows.keys[i], rows.keys[i + ahead], scratch.queries, form.dim,
            form.block_size, scratch.scores + 4 * (i - first) * form.block_size, STRIDE, packed, scratch.spare,
        )  # fmt: skip


def _finish_blocks(
    rows: Any, form: Any, first: int, last: int, scores: int, bent: int, target: Any
) -> None:  # fmt: skip
    """Mask scores that the softcap has bent, and write them out; `bent`: where the cap's slopes go, 0: not wanted."""
    group, block_size = form.group, form.block_size
    for i in range(first, last):
        begin = rows.chosen[i] * block_size
        if begin + block_size > rows.length or rows.holes[rows.chosen[i]] != 0:
            address = scores + 4 * (i - first) * block_size
            mask_scores(group, address, STRIDE, rows.valid, begin, rows.length - begin, block_size)
    tokens = (last - first) * block_size
    if target.raw != 0:
        copy_scores(group, scores, STRIDE, tokens, target.raw + 4 * first * block_size, target.raw_stride)
    if bent != 0:
        bend_weights(group, scores, bent, STRIDE, (tokens + 15) & ~15, form.cap)


def _add_blocks(
    rows: Any, tag: Any, full: Any, rest: Any, form: Any, part: int, first: int, last: int, end: int, weights: int,
    sums: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """sums[head] += weights[head, token] · the value (part 0) or key (1); with values, prefetch as `_score_blocks`."""
    ahead, block_size = last - first, form.block_size
    for i in range(first, last):
        begin = rows.chosen[i] * block_size
        filled = min(block_size, rows.length - begin)
        masked = filled < block_size or rows.holes[rows.chosen[i]] != 0
        following = rows.keys[i + ahead] if part == 0 else 0
        _add_record(
            full, rest, form.group, tag, rows.keys[i], part, following, form.dim, block_size,
            weights + 4 * (i - first) * block_size, STRIDE, sums, rows.valid, begin, filled, masked, packed, spare,
        )  # fmt: skip


def _no_squares(rows: Any, first: int, pairs: int, group: int, weights: int, fades: int, sums: int) -> None:
    return


@borrowing
def _list_blocks(attention: Any, packed: Any, keys: Array, at: int, head: int, begin: int, count: int) -> None:
    """Write the addresses of the blocks begin..begin+count-1 of a (row, KV head)'s list, from `keys[at]` on."""
    blocks, kv_heads = attention.blocks, attention.counts.shape[1]
    record = 2 * blocks.block_size * attention.form.dim * blocks.tag.itemsize
    b, h, block_ptr = head // kv_heads, head % kv_heads, blocks.block_ptr
    items, table = attention.items[b, h], blocks.table[b]
    for i in range(count):
        keys[at + i] = record_of(block_ptr[table[items[begin + i]]], h, record, packed)


# --- steps of pairs --------------------------------------------------------------------------------------------------


@borrowing
def _fetch(row: int, size: int) -> None:
    """Prefetch the keys or the values of a pair."""
    for line in range(0, size, LINE):
        prefetch(row + line, 2)


@by_tiles
@borrowing
def _score_tokens(
    heads: Any, done: int, tag: Any, keys: Array, numbers: Array, first: int, tokens: int, end: int, scratch: Any,
    dim: int, block_size: int, packed: Any,
) -> None:  # fmt: skip
    """scores[head, token] = query[head] · key; prefetch as many tokens that follow before `end`."""
    query, scores = scratch.queries + 4 * done * dim, scratch.scores + done * STRIDE
    end = end if done == 0 else 0
    if packed is not None:
        score_packed_pairs(packed, heads, keys, numbers, first, tokens, end, query, dim, block_size, scores, STRIDE)
        return
    size = 2 * dim * tag.itemsize
    for at in range(first, first + tokens, 4):
        if at + tokens + 4 <= end:
            _fetch(keys[at + tokens], size)
            _fetch(keys[at + tokens + 2], size)
        sums = dot_quad(tag, heads, (keys[at], keys[at + 1], keys[at + 2], keys[at + 3]), query, dim)
        store_quads(scores + 4 * (at - first), STRIDE, heads, sums)


def _score_pairs(
    rows: Any, tag: Any, full: Any, rest: Any, form: Any, first: int, last: int, end: int, scratch: Any, packed: Any
) -> None:  # fmt: skip
    """Scores of the pairs first..last-1; prefetch as many that follow before `end`. packed: None, or all are packed."""
    tokens = 2 * (last - first)
    _score_tokens(
        full, rest, form.group, tag, rows.keys, rows.tokens, 2 * first, tokens, 2 * end, scratch, form.dim,
        form.block_size, packed,
    )  # fmt: skip


def _finish_pairs(
    rows: Any, form: Any, first: int, last: int, scores: int, bent: int, target: Any
) -> None:  # fmt: skip
    """Add the pairs' weights to their scores; `bent`: as for `_finish_blocks`."""
    group, padded = form.group, (2 * (last - first) + 15) & ~15
    if bent != 0:
        bend_weights(group, scores, bent, STRIDE, padded, form.cap)
    nothing, none = splat(NOTHING), splat(MASKED)
    for g in range(group):
        for i in range(0, padded, 16):
            more, address = load_f32(address_of(rows.added) + 4 * (2 * first + i)), scores + g * STRIDE + 4 * i
            store(address, choose_less(more, nothing, none, load_f32(address) + more))


@by_tiles
@borrowing
def _add_tokens(
    heads: Any, done: int, tag: Any, part: int, vectors: Array, numbers: Array, first: int, tokens: int, end: int,
    dim: int, block_size: int, weights: int, sums: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """sums[head] += weights[head, token] · the value (part 0) or key (1); prefetch as `_score_tokens` does."""
    weights, sums, end = weights + done * STRIDE, sums + 4 * done * dim, end if done == 0 else 0
    if packed is not None:
        add_packed_pairs(
            packed, heads, part, vectors, numbers, first, tokens, dim, block_size, weights, STRIDE, sums, spare
        )  # fmt: skip
        return
    wide, share = dim - dim % 64, 64 * tag.itemsize
    for d in range(0, wide, 64):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 4)
        for at in range(first, first + tokens):
            if at + tokens < end:
                _fetch(vectors[at + tokens] + d * tag.itemsize, share)
            columns = load_columns(tag, vectors[at] + d * tag.itemsize, 4)
            tile = outer_fma(tile, columns, spread(weights + 4 * (at - first), STRIDE, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)
    for d in range(wide, dim, 16):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 1)
        for at in range(first, first + tokens):
            columns = load_columns(tag, vectors[at] + d * tag.itemsize, 1)
            tile = outer_fma(tile, columns, spread(weights + 4 * (at - first), STRIDE, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)


def _add_pairs(
    rows: Any, tag: Any, full: Any, rest: Any, form: Any, part: int, first: int, last: int, end: int, weights: int,
    sums: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """As `_add_blocks`, of pairs; the last arguments as for `_score_pairs`."""
    vectors, end = (rows.values, 2 * end) if part == 0 else (rows.keys, 0)
    _add_tokens(
        full, rest, form.group, tag, part, vectors, rows.tokens, 2 * first, 2 * (last - first), end, form.dim,
        form.block_size, weights, sums, packed, spare,
    )  # fmt: skip


def _add_squares(rows: Any, first: int, pairs: int, group: int, weights: int, fades: int, sums: int) -> None:
    """Add a step's drawn pairs to Σ (1 - x) y² [G] at `sums`, relative to the heads' peaks.

    Args:
        first: the step's first pair.
        weights: address of the step's softmax weights, 0 up to a multiple of 32 tokens.
        fades: address of what multiplies earlier weights [G].
    """
    for g in range(group):
        square = splat(np.float32(0.0))
        for i in range(0, pairs, 16):
            y = run_totals(weights + g * STRIDE + 8 * i, _PAIR)
            square = fma(y * y, load_f32(address_of(rows.drawn) + 4 * (first + i)), square)
        fade, address = get(fades + 4 * g), sums + 4 * g
        put(address, get(address) * fade * fade + lane_sum(square))


@borrowing
def _find_pair(
    pair: int, block_ptr: Array, table: Array, holes: Array, h: int, block_size: int, line: int, length: int,
    packed: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """A pair's first token, the addresses of its key and value, and whether the two tokens must be checked.

    In place of the addresses, where blocks are packed: the address of the record, and the token's number in it.
    """
    token = 2 * np.int64(pair)
    block, offset = token >> lowest_bit(block_size), token & (block_size - 1)  # quicker than a division
    record = record_of(block_ptr[table[block]], h, 2 * block_size * line, packed)
    checked = holes[block] != 0 or token + 2 > length
    if packed is not None:
        return token, record, offset, checked
    key = record + offset * line
    return token, key, key + block_size * line, checked


@borrowing
def _list_pairs(
    pairs: Any, attention: Any, packed: Any, rows: Any, zero: int, head: int, begin: int, count: int, length: int
) -> int:  # fmt: skip
    """List the pairs begin..begin+count-1 of a (row, KV head)'s list; return how many of them are packed."""
    blocks, kv_heads, step = attention.blocks, attention.counts.shape[1], STEP_TOKENS // 2
    dim, block_size, skips = attention.form.dim, blocks.block_size, len(pairs.skipped) > 0
    b, h, line, block_ptr = head // kv_heads, head % kv_heads, dim * blocks.tag.itemsize, blocks.block_ptr
    items, weights, table, holes = attention.items[b, h], pairs.weights[b, h], blocks.table[b], blocks.holes[b]
    valid, skipped = blocks.valid[b], pairs.skipped[b if skips else 0 : (b if skips else 0) + 1]
    keys, values, numbers, added, drawn = rows.keys, rows.values, rows.tokens, rows.added, rows.drawn
    front, back = 0, count
    for i in range(count):
        weight = weights[begin + i]
        token, key, value, checked = _find_pair(
            items[begin + i], block_ptr, table, holes, h, block_size, line, length, packed
        )  # fmt: skip
        at, distance = 2 * i, line
        if packed is not None:
            if is_packed(key):
                at, distance, front = 2 * front, 0, front + 1
                numbers[at], numbers[at + 1] = value, value + 1
                if i < step:
                    fetch_pair(packed, key - 1, value, dim, block_size)
                value = key
            else:
                back -= 1
                at, key, value = 2 * back, key + value * line, key + (block_size + value) * line
        drawn[at // 2] = -weight
        for j in range(2):
            added[at + j], keys[at + j], values[at + j] = weight, key + j * distance, value + j * distance
            n = token + j
            if (checked or skips) and (n >= length or valid[n] == 0 or (skips and skipped[0, h, n] != 0)):
                added[at + j] = MASKED
                if distance != 0:  # packed tokens are finite
                    keys[at + j] = values[at + j] = zero
        if packed is None and i < step:
            _fetch(keys[2 * i], 2 * line)
            _fetch(values[2 * i], 2 * line)
    for i in range(0, 4 * count, 64):
        store(address_of(drawn) + i, splat(np.float32(1.0)) - exp(load_f32(address_of(drawn) + i)))
    for at in range(2 * count, 2 * (count + step)):  # is scored, or prefetched, and not attended
        put_word(address_of(keys) + 8 * at, zero)
        put_word(address_of(values) + 8 * at, zero)
    return front


@borrowing
def _list_following(attention: Any, rows: Any, at: int, head: int, begin: int, count: int, length: int) -> None:
    """Write the addresses of pairs of another list behind `at` pairs, to be prefetched; none is packed."""
    blocks, kv_heads = attention.blocks, attention.counts.shape[1]
    block_size, line, keys, values = (
        blocks.block_size,
        attention.form.dim * blocks.tag.itemsize,
        rows.keys,
        rows.values,
    )
    b, h, block_ptr = head // kv_heads, head % kv_heads, blocks.block_ptr
    items, table, holes = attention.items[b, h], blocks.table[b], blocks.holes[b]
    for i in range(count):
        _, key, value, _ = _find_pair(
            items[begin + i], block_ptr, table, holes, h, block_size, line, length, None
        )  # fmt: skip
        for j in range(2):
            keys[2 * (at + i) + j], values[2 * (at + i) + j] = key + j * line, value + j * line


# --- parts, and the kernel -------------------------------------------------------------------------------------------


_score_step = by_class({BlockRows: _score_blocks, PairRows: _score_pairs})
_finish_scores = by_class({BlockRows: _finish_blocks, PairRows: _finish_pairs})
_add_step = by_class({BlockRows: _add_blocks, PairRows: _add_pairs})
_add_step_squares = by_class({BlockRows: _no_squares, PairRows: _add_squares})


@borrowing
def _attend_step(
    rows: Any, tag: Any, full: Any, rest: Any, form: Any, first: int, last: int, end: int, scratch: Any, target: Any,
    packed: Any,
) -> None:  # fmt: skip
    """Attend the items first..last-1 of `rows` as one softmax step; prefetch the next step's, of pairs before `end`.

    Args:
        packed: of blocks as in `HostBlocks`; of pairs: None, or all are packed.
    """
    group, dim, cap, scores, state = form.group, form.dim, form.cap, scratch.scores, target.state
    tokens = (last - first) * form.unit
    padded = (tokens + 31) & ~31
    _score_step(rows, tag, full, rest, form, first, last, end, scratch, packed)
    if cap > 0.0:
        soften_scores(group, scores, STRIDE, padded, cap)
    bent = scores + group * STRIDE if cap > 0.0 and target.kbar != 0 else 0
    _finish_scores(rows, form, first, last, scores, bent, target)
    clear_scores(group, scores, STRIDE, tokens, padded)
    fades = state + 8 * group
    softmax_step(group, scores, STRIDE, padded, state, state + 4 * group, fades)
    _add_step_squares(rows, first, padded // 2, group, scores, fades, state + 12 * group)
    shrink_sums(group, target.sums, dim, fades)
    if target.kbar != 0:
        shrink_sums(group, target.kbar, dim, fades)
        if bent != 0:
            scale_weights(group, bent, scores, STRIDE, padded)
    for part in range(2 if target.kbar != 0 else 1):  # V, then K; in a loop: inlined twice, it costs compile time
        weights, sums = (scores, target.sums) if part == 0 else (bent if bent != 0 else scores, target.kbar)
        _add_step(rows, tag, full, rest, form, part, first, last, end, weights, sums, packed, scratch.spare)


def _attend_blocks(
    pairs: Any, full: Any, rest: Any, attention: Any, packed: Any, form: Any, lists: Any, scratch: Any, target: Any,
    head: int, begin: int, count: int, other: int, start: int, ahead: int, length: int,
) -> None:  # fmt: skip
    """Attend the blocks begin..begin+count-1 of the list of (row, KV head) `head`.

    Args:
        pairs: None.
        lists: from `attention_lists`.
        other, start, ahead: the last step prefetches the blocks start..start+ahead-1 of another list.
    """
    blocks, keys, step = attention.blocks, lists.keys, max(1, STEP_TOKENS // form.unit)
    b, h = head // attention.counts.shape[1], head % attention.counts.shape[1]
    _list_blocks(attention, packed, keys, 0, head, begin, count)
    _list_blocks(attention, packed, keys, count, other, start, ahead)
    for i in range(count + ahead, count + step):
        keys[i] = keys[max(i - 1, 0)]
    chosen = attention.items[b, h, begin : begin + count]
    rows = BlockRows(keys, chosen, blocks.holes[b], blocks.valid[b], length)
    for first in range(0, count, step):
        last = min(first + step, count)
        _attend_step(rows, blocks.tag, full, rest, form, first, last, 0, scratch, target, packed)


def _attend_pairs(
    pairs: Any, full: Any, rest: Any, attention: Any, packed: Any, form: Any, lists: Any, scratch: Any, target: Any,
    head: int, begin: int, count: int, other: int, start: int, ahead: int, length: int,
) -> None:  # fmt: skip
    """As `_attend_blocks`, of pairs."""
    tag, rows, step = attention.blocks.tag, lists, STEP_TOKENS // 2
    front = _list_pairs(pairs, attention, packed, rows, scratch.zero, head, begin, count, length)
    if packed is None and count > 0:
        _list_following(attention, rows, count, other, start, ahead, length)
    if packed is not None:
        for first in range(0, front, step):
            last = min(first + step, front)
            _attend_step(rows, tag, full, rest, form, first, last, front, scratch, target, packed)
    for first in range(front, count, step):
        last = min(first + step, count)
        _attend_step(rows, tag, full, rest, form, first, last, count + step, scratch, target, None)


_attend_list = by_class({NoneType: _attend_blocks, Pairs: _attend_pairs})


@jit
def attention_lists(form: Any, packed: Any, capacity: int, parts: int) -> Any:
    """Memory for the tokens of one part at a time: `PairRows`, of which blocks use `keys` alone.

    Args:
        form, packed, parts: of the attention and its blocks.
        capacity: items of a list.
    """
    step = max(1, STEP_TOKENS // form.unit)
    most = most_part_items(capacity, parts, form.unit, step) + 2 * step
    tokens = 2 * most if form.unit == 2 else 0
    return PairRows(
        np.empty(max(most, tokens), np.int64),
        np.empty(tokens, np.int64),
        np.empty(0 if packed is None else tokens, np.int64),
        np.empty(tokens + 32, np.float32),
        np.zeros(tokens // 2 + 16, np.float32),
    )


@jit
def attention_scratch(form: Any, packed: Any) -> Array:
    """Memory for `Scratch`, float32."""
    row, spare = 4 * form.dim, spare_bytes(packed, form.dim, form.block_size)
    return np.zeros((128 + (form.group + 1) * row + 2 * form.group * STRIDE + spare) // 4, np.float32)


@borrowing
def attend_part(
    full: Any, rest: Any, attention: Any, floats: Array, lists: Any, task: int, following: int, length: int
) -> None:  # fmt: skip
    """Attend one part of the list of one (row, KV head), the last step prefetching the first of part `following`.

    Args:
        floats, lists: from `attention_scratch` and `attention_lists`.
        following: another part; the number of all parts: none.
    """
    form, counts, parts, unit = attention.form, attention.counts, attention.parts, attention.form.unit
    dim, group, step = form.dim, form.group, max(1, STEP_TOKENS // unit)
    head, part, wants_kbar = task // parts, 4 * group * dim, attention.kbar != 0
    queries = (address_of(floats) + 63) & ~63
    zero = queries + part + 2 * group * STRIDE
    scratch = Scratch(queries, queries + part, zero, zero + 4 * dim)
    begin, count = part_of(task, parts, unit, step, counts)
    start, ahead = 0, 0
    if following < parts * counts.size:
        start, ahead = part_of(following, parts, unit, step, counts)
    sums, raw, raw_stride = attention.partial + task * attention.step, 0, 0
    if attention.scores != 0:
        raw_stride = 4 * unit * attention.items.shape[2]
        raw = attention.scores + head * group * raw_stride + 4 * begin * unit
    state = sums + partial_state(group, dim, wants_kbar)
    target = Target(sums, sums + part if wants_kbar else 0, state, raw, raw_stride)
    for offset in range(0, part, 64):
        source = attention.query + head * part + offset
        store(queries + offset, load_f32(source) * splat(np.float32(attention.scale)))
    clear_part(sums, dim, group, wants_kbar)
    _attend_list(
        attention.pairs, full, rest, attention, attention.blocks.packed, form, lists, scratch, target, head, begin,
        count, following // parts, start, min(ahead, step), length,
    )  # fmt: skip
    hold(floats)


def _no_errors(pairs: Any, attention: Any, head: int) -> None:
    return


def _write_errors(pairs: Any, attention: Any, head: int) -> None:
    """Write the heads' errors [G] after their parts were merged, and count them (see the module's description)."""
    kv_heads, dim, parts, group = attention.counts.shape[1], attention.form.dim, attention.parts, attention.form.group
    state = partial_state(group, dim, attention.kbar != 0)
    origin, b = attention.partial + head * parts * attention.step, head // kv_heads
    first = head % kv_heads * group
    for g in range(group):
        square = 0.0
        for part in range(parts):
            at = origin + part * attention.step + state + 4 * g
            share = np.float64(get(at + 8 * group))
            square += share * share * get(at + 12 * group)
        error = math.sqrt(_EVEN * square) * pairs.portion[b, first + g]
        pairs.errors[b, first + g] = error
        if error < 1e3:  # not NaN
            octaves = math.log2(error) - LEAST_ERROR if error > 0.0 else 0.0
            number: Any = min(max(np.int64(octaves * ERROR_STEPS), 0), ERROR_BINS - 1)
            add_to(pairs.tally, 0, 1)
            add_to(pairs.tally, 1, np.int64(error * 2.0**32))
            add_to(pairs.tally, 2 + number, 1)


_finish_errors = by_class({NoneType: _no_errors, Pairs: _write_errors})


@borrowing
def merge_head(attention: Any, head: int) -> None:
    """Merge the parts of one (row, KV head)."""
    kv_heads, dim, parts, group = attention.counts.shape[1], attention.form.dim, attention.parts, attention.form.group
    origin, at = attention.partial + head * parts * attention.step, 4 * head * group * dim
    lse = attention.lse[head // kv_heads, head % kv_heads * group : (head % kv_heads + 1) * group]
    merge_parts(
        origin, parts, attention.step, dim, group, attention.kbar != 0, lse, attention.out + at, attention.kbar + at
    )  # fmt: skip
    _finish_errors(attention.pairs, attention, head)


@kernel
def attention_kernel(
    ticket: Array, tasks: int, full: Any, rest: Any, attention: Any, length: int, finished: Array
) -> None:  # fmt: skip
    """One task = one part of the list of one (row, KV head); the thread that finishes its last part merges them."""
    parts, packed = attention.parts, attention.blocks.packed
    floats, capacity = attention_scratch(attention.form, packed), attention.items.shape[2]
    lists = attention_lists(attention.form, packed, capacity, parts)
    task = count_up(ticket, 0)
    while task < tasks:
        following = reserve(ticket, tasks)
        attend_part(full, rest, attention, floats, lists, task, following, length)
        if count_up(finished, task // parts) == parts - 1:
            merge_head(attention, task // parts)
        count_up(ticket, 1)
        task = following if following < tasks else count_up(ticket, 0)


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def decode_attention(
    query: Array,
    blocks: HostBlocks,
    items: Array,
    counts: Array,
    length: int,
    out: Array,
    lse: Array,
    kbar: Array | None = None,
    *,
    scale: float,
    softcap: float | None,
    pairs: Pairs | None = None,
    scores: Array | None = None,
) -> Launch:
    """Prepare softmax attention of one query token of each row to listed blocks, or to listed pairs of tokens.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        blocks: where the rows' tokens are.
        items: int32 [B, Hkv, C], logical blocks, or with `pairs` pairs of tokens, each at most once; entries from the
            count on are ignored.
        counts: int32 [B, Hkv], how many are attended.
        length: tokens in every row; those beyond contribute nothing.
        out: float32 [B, Hq, D], written: attention output; 0 where nothing is attended.
        lse: float32 [B, Hq], written: natural log of the sum of exp(score); -inf where nothing is attended.
        kbar: float32 [B, Hq, D] or None, written: the keys averaged with the softmax weights (with a softcap, each
            weight times the cap's derivative), for a first-order correction of the query.
        scale: factor of the scores, usually D ** -0.5.
        softcap: c in score = c * tanh(score / c), or None.
        pairs: what pairs have besides their numbers; None: `items` are blocks.
        scores: float32 [B, Hq, C * block_size] or None, written: the score of each token of the listed blocks as it
            enters the softmax, in the order of the lists; -inf where it is not attended. Entries from the count on are
            not written. Not with pairs.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    (batch, query_heads, dim), (_, kv_heads, capacity) = query.shape, items.shape
    group, shape = group_size(query_heads, kv_heads), (batch, kv_heads, capacity)
    blocks.check(batch, dim, length)
    require("query", query, F32, (batch, query_heads, dim))
    require("items", items, I32, shape)
    require("counts", counts, I32, shape[:2])
    require("out", out, F32, query.shape)
    require("lse", lse, F32, (batch, query_heads))
    if kbar is not None:
        require("kbar", kbar, F32, query.shape)
    if pairs is not None:
        pairs.check(shape, query_heads, length)
        if scores is not None:
            raise ValueError("scores are written for blocks; pass scores=None with pairs")
    elif scores is not None:
        require("scores", scores, F32, (batch, query_heads, capacity * blocks.block_size))
    unit, heads = blocks.block_size if pairs is None else 2, batch * kv_heads
    tokens = capacity * unit
    # The split depends on shapes and counts alone, so that results are the same on any number of threads.
    parts = max(1, min(-(-tokens // PART_TOKENS), PARTS // heads))
    partial, finished = partial_results(heads * parts, group, dim, kbar is not None), np.zeros(heads, np.int64)
    form = Form(group, dim, blocks.block_size, unit, cap_of(softcap) or 0.0)
    attention = Attention(
        blocks, items, counts, pairs, lse, form, float(scale), query.ctypes.data, out.ctypes.data, _address(kbar),
        _address(scores), partial.ctypes.data, 4 * partial.shape[1], parts,
    )  # fmt: skip
    cost = heads * tokens * 2 * dim * blocks.tag.itemsize
    return Launch(
        attention_kernel, heads * parts, (*head_tiles(group), attention, int(length), finished), cost,
        (query, out, kbar, scores, partial), finished,
    )  # fmt: skip
