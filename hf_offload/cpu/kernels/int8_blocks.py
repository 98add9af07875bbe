"""Int8 blocks: keys with a scale and a middle for each channel, values with a scale for each token.

A packed record of one (block, KV head) is K codes int8 [block_size, D]; V codes int8 [block_size / 2, D, 2], of 2
tokens side by side; D words, the high half the scale of a channel of the keys, the low half its middle, bfloat16; value
scales bfloat16 [max(block_size, 16)]; padded to whole cache lines. The two axes differ because keys, unlike values,
have channels that are large in every token. Codes of keys count from the middle of the channel's range in the block:
such channels seldom change their sign. The address of a packed record has a 1 in its lowest bit.

    key[token, d] = code[token, d] * scale[d] + middle[d];  value[token, d] = code[token, d] * scale[token]

Attention multiplies the codes in integers. The float operand (the query, or the softmax weights) is multiplied by the
codes' scales and rounded to int16, with one unit for each head and block (for the weights of listed pairs: and softmax
step). No rounding error exceeds half a unit: a score is off by at most D / 65534 of the largest product of a single
channel, a weight by at most 1 / 65534 of the largest of its block or step. The products with the middles are floats.
Only the keys of listed pairs become floats: to scale the query for each record would take longer.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from hf_offload.cpu.kernels.block import STEP_TOKENS, add_weighted
from hf_offload.cpu.kernels.packed import READERS, Reader, is_packed
from hf_offload.cpu.launch import I32, I64, Array, Launch, check_geometry, jit, jit_for_python, kernel, require, tag_of
from hf_offload.cpu.memory import LINE, address_of, count_up, get, hold, next_task, prefetch, put
from hf_offload.cpu.simd.convert import choose_units, first_half, round_rows, scale_rows
from hf_offload.cpu.simd.int_dot import add_row_dots, add_sums, add_value_pairs, no_sums, row_scores
from hf_offload.cpu.simd.register_tiles import (
    load_at,
    load_tile,
    outer_fma,
    quad_sums,
    spread,
    store_quads,
    store_tile,
    zeros,
)
from hf_offload.cpu.simd.vectors import (
    BITS8,
    FLOATS,
    LANES,
    ROUNDER,
    VECTOR,
    WORDS,
    choose_less,
    fma,
    get_upper,
    lane_max,
    lane_sum,
    load,
    load_f32,
    load_high,
    load_low,
    lowered,
    pointer,
    round_nearest,
    round_up,
    shuffle,
    splat,
    store,
    store_halves,
    store_upper,
    vmax,
)

_CODES, _PAIR = (ir.VectorType(BITS8, count) for count in (LANES, 2 * LANES))


def _codes(builder: Any, vector: Any) -> Any:
    return builder.trunc(builder.bitcast(builder.fadd(vector, ROUNDER), WORDS), _CODES)


@lowered
def store_codes(typing: Any, address: Any, vector: Any) -> Any:
    """Write 16 lanes, of magnitude at most 127, rounded to int8."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(_codes(builder, args[1]), pointer(builder, args[0], _CODES), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR), emit


@lowered
def store_value_codes(typing: Any, address: Any, even: Any, odd: Any) -> Any:
    """Write 16 lanes of each of two tokens, magnitudes up to 127, side by side as int8."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = [lane + LANES * odd for lane in range(LANES) for odd in (0, 1)]
        both = shuffle(builder, _codes(builder, args[1]), _codes(builder, args[2]), lanes)
        builder.store(both, pointer(builder, args[0], _PAIR), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR, VECTOR), emit


@lowered
def load_value_codes(typing: Any, address: Any) -> Any:
    """Every other code of 32 as floats; for an odd token it reads one byte beyond its own, inside the record."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        both = builder.load(pointer(builder, args[0], _PAIR), align=1)
        codes = shuffle(builder, both, both, range(0, 2 * LANES, 2))
        return builder.sitofp(builder.sext(codes, WORDS), FLOATS)

    return VECTOR(types.int64), emit


CODES, SCALES = np.empty(0, np.int8), np.empty(0, np.uint16)  # tags, see `launch.TAGS`
_UNITS = 64  # bytes for the units of a register tile of heads, and what is added to its scores
_ADDED = 32  # where the latter begins


@jit
def _spare_bytes(dim: int, block_size: int) -> int:
    """Bytes of scratch (`spare`) that the functions below need for one register tile of heads."""
    return _UNITS + 24 * max(dim + 16, block_size, STEP_TOKENS) + 2 * STEP_TOKENS


# --- a whole block ---------------------------------------------------------------------------------------------------


@jit
def _round(heads: Any, peaks: Any, scaled: int, width: int, spare: int) -> None:
    """Write float32 rows [heads, width] as int16 rows behind the units, which follow from each row's largest entry."""
    choose_units(peaks, spare)
    for i in range(0, width, 16):
        round_rows(scaled + 4 * i, 4 * width, spare, spare + _UNITS + 2 * i, 2 * width, heads)


@jit
def _fold_query(heads: Any, query: int, dim: int, words: int, width: int, spare: int) -> None:
    """Multiply queries by the scales of a record's keys; write int16 [heads, width], 0 behind D, units and additions.

    Args:
        width: D, rounded up to 32.
        spare: units float32 [4] and their inverses [4], products of the queries with the middles [4]; int16 rows,
            float32 rows.
    """
    scaled = spare + _UNITS + 2 * len(heads) * width
    peaks, middles = zeros(heads, 1), zeros(heads, 1)
    for d in range(0, dim, 16):
        peaks = scale_rows(peaks, query + 4 * d, 4 * dim, load_high(words + 4 * d), scaled + 4 * d, 4 * width, heads)
        middles = outer_fma(middles, (load_low(words + 4 * d),), load_tile(query + 4 * d, 4 * dim, heads, 1))
    for head in range(len(heads)):
        put(spare + _ADDED + 4 * head, lane_sum(middles[head]))
        if width > dim:
            store(scaled + 4 * (head * width + dim), splat(np.float32(0.0)))
    _round(heads, peaks, scaled, width, spare)


@jit
def _score(
    heads: Any, record: int, ahead: int, query: int, dim: int, block_size: int, scores: int, stride: int, spare: int
) -> None:
    """`block.score_block` for a packed record."""
    words, width = 2 * block_size * dim, (dim + 31) & ~31
    _fold_query(heads, query, dim, record + words, width, spare)
    if ahead != 0:
        for line in range(words, words + 4 * dim + 2 * block_size, LINE):
            prefetch(ahead + line, 2)
    for token in range(0, block_size, 4):
        first = record + token * dim
        if ahead != 0:
            for line in range(token * dim // 2, token * dim // 2 + 2 * dim, LINE):
                prefetch(ahead + line, 2)
                prefetch(ahead + block_size * dim + line, 2)
        sums = no_sums(heads, 4)
        for d in range(0, dim, 32):  # beyond D: the next row, times 0
            at = first + d
            sums = add_row_dots(
                sums, (at, at + dim, at + 2 * dim, at + 3 * dim), spare + _UNITS + 2 * d, 2 * width, heads
            )
        store_quads(scores + 4 * token, stride, heads, row_scores(sums, spare))


@jit
def _fold_weights(heads: Any, weights: int, stride: int, tokens: int, scales: int, spare: int) -> None:
    """Multiply softmax weights by the values' scales; write int16 [heads, tokens] and units, as `_fold_query`.

    The weights of 8 tokens are padded with zeros; other numbers of tokens are multiples of 16.
    """
    width = max(tokens, 16)
    scaled = spare + _UNITS + 2 * len(heads) * width
    if tokens < 16:
        for head in range(len(heads)):
            store(scaled + 64 * head, first_half(load_f32(weights + head * stride)))
        weights, stride = scaled, 64
    peaks = zeros(heads, 1)
    for i in range(0, width, 16):
        peaks = scale_rows(
            peaks, weights + 4 * i, stride, load(SCALES, scales + 2 * i), scaled + 4 * i, 4 * width, heads
        )
    _round(heads, peaks, scaled, width, spare)


@jit
def _add_values(
    heads: Any, record: int, ahead: int, dim: int, block_size: int, weights: int, stride: int, sums: int, spare: int
) -> None:
    """`block.add_weighted` for all values of a packed record; codes are finite, so a weight of 0 excludes a token."""
    shorts, step = spare + _UNITS, 2 * max(block_size, 16)
    _fold_weights(heads, weights, stride, block_size, record + 2 * (block_size + 2) * dim, spare)
    values = record + block_size * dim
    wide = dim - dim % 64
    half = block_size * dim // 2
    for d in range(0, wide, 64):
        tile = no_sums(heads, 4)
        for token in range(0, block_size, 2):
            if ahead != 0:
                share = ahead + half + (d * block_size + 64 * token) // 2
                prefetch(share, 2)
                prefetch(share + 2 * half, 2)
            tile = add_value_pairs(tile, values + token * dim + 2 * d, shorts + 2 * token, step, heads)
        add_sums(sums + 4 * d, 4 * dim, spare, heads, tile)
    for d in range(wide, dim, 16):
        tile = no_sums(heads, 1)
        for token in range(0, block_size, 2):
            if ahead != 0:
                share = ahead + half + (d * block_size + 16 * token) // 2
                prefetch(share, 2)
                prefetch(share + 2 * half, 2)
            tile = add_value_pairs(tile, values + token * dim + 2 * d, shorts + 2 * token, step, heads)
        add_sums(sums + 4 * d, 4 * dim, spare, heads, tile)


@jit
def _add_keys(
    heads: Any, record: int, dim: int, block_size: int, weights: int, stride: int, sums: int, spare: int
) -> None:
    """`block.add_weighted` for all keys of a packed record, in floats."""
    for address in range(spare, spare + 4 * len(heads) * dim, 64):
        store(address, splat(np.float32(0.0)))
    add_weighted(CODES, heads, record, 0, dim, block_size, weights, stride, spare, 0, block_size)
    words = record + 2 * block_size * dim
    for head in range(len(heads)):
        whole = np.float32(0.0)
        for token in range(block_size):
            whole += get(weights + head * stride + 4 * token)
        for d in range(0, dim, 16):
            offset = 4 * (head * dim + d)
            sum_so_far = fma(splat(whole), load_low(words + 4 * d), load_f32(sums + offset))
            store(sums + offset, fma(load_f32(spare + offset), load_high(words + 4 * d), sum_so_far))


# --- listed pairs ----------------------------------------------------------------------------------------------------


@jit
def _fetch_pair(record: int, token: int, dim: int, block_size: int) -> None:
    """Prefetch what the two tokens from an even one on take."""
    key, words = record + token * dim, record + 2 * block_size * dim
    for line in range(0, 2 * dim, LINE):
        prefetch(key + line, 2)
        prefetch(key + block_size * dim + line, 2)
    for line in range(0, 4 * dim, LINE):
        prefetch(words + line, 2)
    prefetch(words + 4 * dim + 2 * token, 2)


@jit
def _scaled_keys(codes: Any, words: Any) -> Any:
    """Two keys' codes times the scales, plus the middles."""
    scale, middle = load_high(words), load_low(words)
    return fma(codes[0], scale, middle), fma(codes[1], scale, middle)


@jit
def _score_pairs(
    heads: Any, records: Array, numbers: Array, first: int, tokens: int, end: int, query: int, dim: int,
    block_size: int, scores: int, stride: int,
) -> None:  # fmt: skip
    for i in range(0, tokens, 4):
        at = first + i
        other = at + 2 if i + 2 < tokens else at
        for following in (at + tokens, at + tokens + 2):
            if following < end:
                _fetch_pair(records[following] - 1, numbers[following], dim, block_size)
        a, b = records[at] - 1, records[other] - 1
        key, more = a + numbers[at] * dim, b + numbers[other] * dim
        words, others = a + 2 * block_size * dim, b + 2 * block_size * dim
        tile = zeros(heads, 4)
        for d in range(0, dim, 16):
            codes = load_at(CODES, (key, key + dim, more, more + dim), d)
            keys = _scaled_keys(codes[:2], words + 4 * d) + _scaled_keys(codes[2:], others + 4 * d)
            tile = outer_fma(tile, keys, load_tile(query + 4 * d, 4 * dim, heads, 1))
        store_quads(scores + 4 * i, stride, heads, quad_sums(tile))


@jit
def _sum_pairs(
    tile: Any, heads: Any, records: Array, numbers: Array, first: int, tokens: int, dim: int, block_size: int, d: int,
    step: int, spare: int,
) -> Any:  # fmt: skip
    """Add the products of the pairs' values from channel d on with int16 weights, heads `step` bytes apart."""
    for i in range(0, tokens, 2):
        values = records[first + i] - 1 + (block_size + numbers[first + i]) * dim
        tile = add_value_pairs(tile, values + 2 * d, spare + _UNITS + 2 * i, step, heads)
    return tile


@jit
def _add_pairs(
    heads: Any, part: int, records: Array, numbers: Array, first: int, tokens: int, dim: int, block_size: int,
    weights: int, stride: int, sums: int, spare: int,
) -> None:  # fmt: skip
    if part == 1:
        for d in range(0, dim, 16):
            keys = load_tile(sums + 4 * d, 4 * dim, heads, 1)
            for i in range(tokens):
                record = records[first + i] - 1
                words = record + 2 * block_size * dim + 4 * d
                codes = load(CODES, record + numbers[first + i] * dim + d)
                key = fma(codes, load_high(words), load_low(words))
                keys = outer_fma(keys, (key,), spread(weights + 4 * i, stride, heads))
            store_tile(sums + 4 * d, 4 * dim, heads, keys)
        return
    width = (tokens + 15) & ~15
    scales = spare + _spare_bytes(dim, block_size) - 2 * STEP_TOKENS
    for i in range(0, 2 * width, 64):
        store(scales + i, splat(np.float32(0.0)))
    for i in range(0, tokens, 2):  # two bfloat16 at a time
        put(scales + 2 * i, get(records[first + i] - 1 + 2 * (block_size + 2) * dim + 2 * numbers[first + i]))
    _fold_weights(heads, weights, stride, width, scales, spare)
    wide = dim - dim % 64
    for d in range(0, wide, 64):
        tile = no_sums(heads, 4)
        tile = _sum_pairs(tile, heads, records, numbers, first, tokens, dim, block_size, d, 2 * width, spare)
        add_sums(sums + 4 * d, 4 * dim, spare, heads, tile)
    for d in range(wide, dim, 16):
        strip = no_sums(heads, 1)
        strip = _sum_pairs(strip, heads, records, numbers, first, tokens, dim, block_size, d, 2 * width, spare)
        add_sums(sums + 4 * d, 4 * dim, spare, heads, strip)


class Int8Records(NamedTuple):
    """Packed records for kernels (`packed.py`)."""

    record_bytes: int


READERS[Int8Records] = Reader(_score, _add_values, _add_keys, _fetch_pair, _score_pairs, _add_pairs, _spare_bytes)


# --- packing and unpacking -------------------------------------------------------------------------------------------


_TOP = np.float32(3e38)
_CHUNK_BYTES = 1 << 16


@jit_for_python
def _last_line(dim: int, block_size: int) -> int:
    """Where a packed record's last cache line begins."""
    size = 2 * (block_size + 2) * dim + 2 * max(block_size, 16)
    return (size - 1) // LINE * LINE


def packed_bytes(dim: int, block_size: int) -> int:
    """Bytes of the packed record of one block and KV head."""
    return _last_line(dim, block_size) + LINE


@jit
def _clean(tag: Any, address: int) -> Any:
    """16 stored elements, with 0 for those that are not finite."""
    x, zero = load(tag, address), splat(np.float32(0.0))
    return choose_less(vmax(x, zero - x), splat(_TOP), x, zero)


@jit
def _inverse(scale: Any) -> Any:
    """1 / scale, 0 where the scale is 0."""
    zero = splat(np.float32(0.0))
    return choose_less(zero, scale, splat(np.float32(1.0)) / scale, zero)


@jit
def _pack(
    tag: Any, keys: int, values: int, key_step: int, value_step: int, record: int, dim: int, block_size: int, peaks: int
) -> None:
    zero, part, half = splat(np.float32(0.0)), splat(np.float32(1.0) / np.float32(127.0)), splat(np.float32(0.5))
    codes, words = record + block_size * dim, record + 2 * block_size * dim
    scales = words + 4 * dim
    store(record + _last_line(dim, block_size), zero)  # what pads it is saved, too
    for d in range(0, dim, 16):
        column = keys + d * tag.itemsize
        high = _clean(tag, column)
        low = zero - high  # its negative, so that a maximum finds it
        for token in range(1, block_size):
            x = _clean(tag, column + token * key_step)
            high, low = vmax(high, x), vmax(low, zero - x)
        middle = round_nearest(high * half - low * half)
        scale = round_up(vmax(high - middle, low + middle) * part)
        store_halves(words + 4 * d, scale, middle)
        inverse = _inverse(scale)
        for token in range(block_size):
            store_codes(record + token * dim + d, (_clean(tag, column + token * key_step) - middle) * inverse)
    for token in range(block_size):
        peak = zero
        for d in range(0, dim, 16):
            x = _clean(tag, values + token * value_step + d * tag.itemsize)
            peak = vmax(peak, vmax(x, zero - x))
        put(peaks + 4 * token, lane_max(peak))
    for token in range(0, block_size, 16):
        store_upper(scales + 2 * token, load_f32(peaks + 4 * token) * part)
        store(peaks + 4 * token, _inverse(load(SCALES, scales + 2 * token)))
    for token in range(0, block_size, 2):
        even, odd = splat(get(peaks + 4 * token)), splat(get(peaks + 4 * token + 4))
        for d in range(0, dim, 16):
            address = values + token * value_step + d * tag.itemsize
            x, y = _clean(tag, address) * even, _clean(tag, address + value_step) * odd
            store_value_codes(codes + token * dim + 2 * d, x, y)


@kernel
def pack_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    keys: Array,
    values: Array,
    key_step: int,
    value_step: int,
    records: Array,
    dim: int,
    block_size: int,
    chunk: int,
) -> None:
    """One task = `chunk` records."""
    peaks = np.zeros(max(block_size, 16), np.float32)
    task = count_up(ticket, 0)
    while task < tasks:
        for i in range(task * chunk, min((task + 1) * chunk, records.shape[0])):
            _pack(tag, keys[i], values[i], key_step, value_step, records[i], dim, block_size, address_of(peaks))
        task = next_task(ticket)
    hold(peaks)


@jit
def _unpack(tag: Any, address: int, key: int, value: int, token: int, count: int, dim: int, block_size: int) -> None:
    """Write `count` tokens from `token` on of a record, packed or not, as float32 [count, D]."""
    if not is_packed(address):
        size = dim * tag.itemsize
        for entry in range(0, count * dim, 16):
            at = address + token * size + entry * tag.itemsize
            store(key + 4 * entry, load(tag, at))
            store(value + 4 * entry, load(tag, at + block_size * size))
        return
    record = address - 1
    words = record + 2 * block_size * dim
    for i in range(token, token + count):
        share = splat(get_upper(words + 4 * dim + 2 * i))
        values = record + (block_size + i // 2 * 2) * dim + i % 2
        for d in range(0, dim, 16):
            at = 4 * ((i - token) * dim + d)
            codes = load(CODES, record + i * dim + d)
            store(key + at, fma(codes, load_high(words + 4 * d), load_low(words + 4 * d)))
            store(value + at, load_value_codes(values + 2 * d) * share)


@kernel
def unpack_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    records: Array,
    tokens: Array,
    counts: Array,
    keys: Array,
    values: Array,
    dim: int,
    block_size: int,
    chunk: int,
) -> None:
    """One task = `chunk` records."""
    task = count_up(ticket, 0)
    while task < tasks:
        for i in range(task * chunk, min((task + 1) * chunk, records.shape[0])):
            _unpack(tag, records[i], keys[i], values[i], tokens[i], counts[i], dim, block_size)
        task = next_task(ticket)


def pack_records(
    keys: Array,
    values: Array,
    key_step: int,
    value_step: int,
    records: Array,
    *,
    kv_dtype: torch.dtype,
    dim: int,
    block_size: int,
    keep: tuple[Any, ...] = (),
) -> Launch:
    """Prepare packing of n full records; elements that are not finite become 0.

    Args:
        keys, values: int64 [n], addresses in bytes of each block's first token.
        key_step, value_step: bytes between consecutive tokens.
        records: int64 [n], addresses to write the packed records to (lowest bit 0).
        kv_dtype: dtype of keys and values.
        dim: head dimension, a multiple of 16 up to 256.
        block_size: tokens of a block.
        keep: objects whose memory the kernel reaches only by address.

    Raises:
        ValueError: arrays of different lengths, or sizes or a memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    check_geometry(dim, block_size)
    for name, array in (("keys", keys), ("values", values), ("records", records)):
        require(name, array, I64, records.shape[:1])
    tag = tag_of(kv_dtype)
    nbytes = 2 * block_size * dim * tag.itemsize
    chunk = max(1, _CHUNK_BYTES // nbytes)
    args = (tag, keys, values, int(key_step), int(value_step), records, int(dim), int(block_size), chunk)
    return Launch(pack_kernel, -(-len(records) // chunk), args, len(records) * nbytes, keep)


def unpack_records(
    records: Array,
    tokens: Array,
    counts: Array,
    keys: Array,
    values: Array,
    *,
    kv_dtype: torch.dtype,
    dim: int,
    block_size: int,
    keep: tuple[Any, ...] = (),
) -> Launch:
    """Prepare unpacking tokens of n records, packed or not, to float32.

    Args:
        records: int64 [n], addresses as in `HostPool.block_ptr` (packed: lowest bit 1).
        tokens: int32 [n], the first token to read.
        counts: int32 [n], number of tokens to read.
        keys, values: int64 [n], addresses of float32 [count, D], written.
        kv_dtype: dtype of the records that are not packed.
        dim, block_size, keep: as in `pack_records`.

    Raises:
        ValueError: arrays of different lengths, tokens beyond the block, or sizes that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    check_geometry(dim, block_size)
    for name, array in (("records", records), ("keys", keys), ("values", values)):
        require(name, array, I64, records.shape[:1])
    require("tokens", tokens, I32, records.shape)
    require("counts", counts, I32, records.shape)
    if len(records) and (tokens.min() < 0 or counts.min() < 0 or (tokens + counts).max() > block_size):
        raise ValueError(f"tokens {tokens.min()}..{(tokens + counts).max()} are not all within a block of {block_size}")
    nbytes = 8 * block_size * dim
    chunk = max(1, _CHUNK_BYTES // nbytes)
    args = (tag_of(kv_dtype), records, tokens, counts, keys, values, int(dim), int(block_size), chunk)
    return Launch(unpack_kernel, -(-len(records) // chunk), args, len(records) * nbytes, keep)
