"""Int8 blocks: keys with a scale and a middle for each channel, values with a scale for each token.

A packed record of one (block, KV head) is K codes int8 [block_size / 4, D / 8, 4, 8] (of 4 tokens in 8 dimensions: a
register of int16), V codes int8 [block_size / 2, D, 2] (of 2 tokens in 16 dimensions), key scales and key middles
bfloat16 [D], value scales bfloat16 [max(block_size, 16)], padded to whole cache lines. The two axes differ because
keys, unlike values, have channels that are large in every token. Codes of keys count from the middle of the channel's
range in the block: such channels seldom change their sign. The address of a packed record has a 1 in its lowest bit.

Attention multiplies the codes in integers. The float operand (the query, or the softmax weights) is multiplied by the
codes' scales and rounded to int16, with one unit for each head and block. No rounding error exceeds half a unit: a
score is off by at most D / 65534 of the largest product of a single channel, a weight by at most 1 / 65534 of the
block's largest. The products with the middles are floats.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from hf_offload.cpu.kernels.packed import READERS, Reader, is_packed
from hf_offload.cpu.launch import I32, I64, Array, Launch, check_geometry, jit, jit_for_python, kernel, require, tag_of
from hf_offload.cpu.memory import LINE, address_of, count_up, get, hold, prefetch, put
from hf_offload.cpu.simd.convert import choose_units, first_half, round_rows, scale_rows
from hf_offload.cpu.simd.int_dot import (
    add_key_octets,
    add_sums,
    add_token_dots,
    add_value_pairs,
    join_key_sums,
    no_sums,
    repeat_octet,
    token_scores,
)
from hf_offload.cpu.simd.register_tiles import store_quads, zeros
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
    lowered,
    pointer,
    shuffle,
    splat,
    store,
    store_nearest,
    store_upper,
    vmax,
)

_LONG = ir.IntType(64)
_HALF, _WHOLE, _PAIR = (ir.VectorType(BITS8, count) for count in (LANES // 2, LANES, 2 * LANES))


@jit
def key_place(token: int, d: int, dim: int) -> int:
    """Offset in bytes of the key codes d..d+15 of a token in its record; d is a multiple of 16."""
    return token // 4 * 4 * dim + 4 * d + token % 4 * 8


@jit
def value_place(token: int, d: int, dim: int, block_size: int) -> int:
    """Offset in bytes of the value codes d..d+15 of a token in its record; d is a multiple of 16."""
    return (block_size + token // 2 * 2) * dim + 2 * d + token % 2


def _codes(builder: Any, vector: Any) -> Any:
    return builder.trunc(builder.bitcast(builder.fadd(vector, ROUNDER), WORDS), _WHOLE)


def _floats(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.sext(codes, WORDS), FLOATS)


def _key_halves(builder: Any, address: Any) -> list[Any]:
    return [pointer(builder, builder.add(address, ir.Constant(_LONG, offset)), _HALF) for offset in (0, 32)]


@lowered
def store_key_codes(typing: Any, address: Any, codes: Any) -> Any:
    """Write 16 lanes, of magnitude at most 127, rounded to int8, at a `key_place`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = _codes(builder, args[1])
        for i, place in enumerate(_key_halves(builder, args[0])):
            builder.store(shuffle(builder, whole, whole, range(8 * i, 8 * i + 8)), place, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR), emit


@lowered
def load_key_codes(typing: Any, address: Any) -> Any:
    """The 16 codes at a `key_place`, as floats."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low, high = (builder.load(place, align=1) for place in _key_halves(builder, args[0]))
        return _floats(builder, shuffle(builder, low, high, range(LANES)))

    return VECTOR(types.int64), emit


@lowered
def store_value_codes(typing: Any, address: Any, even: Any, odd: Any) -> Any:
    """Write 16 lanes of each of two tokens, magnitudes up to 127, as int8 at the `value_place` of the even token."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = [lane + LANES * odd for lane in range(LANES) for odd in (0, 1)]
        both = shuffle(builder, _codes(builder, args[1]), _codes(builder, args[2]), lanes)
        builder.store(both, pointer(builder, args[0], _PAIR), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR, VECTOR), emit


@lowered
def load_value_codes(typing: Any, address: Any) -> Any:
    """The 16 codes at a `value_place`, as floats; reads one byte beyond them, inside the record."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        both = builder.load(pointer(builder, args[0], _PAIR), align=1)
        return _floats(builder, shuffle(builder, both, both, range(0, 2 * LANES, 2)))

    return VECTOR(types.int64), emit


SCALES = np.empty(0, np.uint16)  # a tag, see `launch.TAGS`
_UNITS = 64  # bytes for the units of a register tile of heads, and what is added to its scores
_ADDED = 32  # where the latter begins


@jit
def _spare_bytes(dim: int, block_size: int) -> int:
    """Bytes of scratch (`spare`) that the functions below need for one register tile of heads."""
    return _UNITS + 24 * max(dim, block_size, 16) + 64 * (block_size + 4)


@jit
def _fold(heads: Any, rows: int, row_step: int, width: int, scales: int, spare: int, first: int, second: int) -> None:
    """Multiply float32 rows, one for each head, by scales (bfloat16; address 0: all 1); write int16 rows and units.

    Args:
        width: entries of a row, a multiple of 16.
        first, second: addresses at which to prefetch 4 * width bytes (0: none).
        spare: units float32 [4] and their inverses [4], then int16 [heads, width], then float32 [heads, width].
    """
    shorts = spare + _UNITS
    scaled = shorts + 2 * len(heads) * width
    peaks = zeros(heads, 1)
    for i in range(0, width, 16):
        if first != 0:
            prefetch(first + 4 * i, 2)
        factors = splat(np.float32(1.0)) if scales == 0 else load(SCALES, scales + 2 * i)
        peaks = scale_rows(peaks, rows + 4 * i, row_step, factors, scaled + 4 * i, 4 * width, heads)
    choose_units(peaks, spare)
    for i in range(0, width, 16):
        if second != 0:
            prefetch(second + 4 * i, 2)
        round_rows(scaled + 4 * i, 4 * width, spare, shorts + 2 * i, 2 * width, heads)


@jit
def _fold_weights(heads: Any, weights: int, stride: int, block_size: int, scales: int, spare: int) -> None:
    """`_fold` for softmax weights; those of a block of 8 tokens are padded with zeros."""
    if block_size >= 16:
        _fold(heads, weights, stride, block_size, scales, spare, 0, 0)
        return
    padded = spare + _UNITS + 96 * len(heads)
    for head in range(len(heads)):
        store(padded + 64 * head, first_half(load_f32(weights + head * stride)))
    _fold(heads, padded, 64, 16, scales, spare, 0, 0)


@jit
def _score_middles(heads: Any, query: int, dim: int, middles: int, added: int) -> None:
    """Write the product of each head's query with a record's middles, float32, to `added`."""
    for head in range(len(heads)):
        total = splat(np.float32(0.0))
        for d in range(0, dim, 16):
            total = fma(load_f32(query + 4 * (head * dim + d)), load(SCALES, middles + 2 * d), total)
        put(added + 4 * head, lane_sum(total))


@jit
def _score(
    heads: Any, record: int, ahead: int, query: int, dim: int, block_size: int, scores: int, stride: int, spare: int
) -> None:
    """`block.score_block` for a packed record."""
    facts = 2 * block_size * dim
    if ahead != 0:
        for line in range(facts, facts + 2 * (2 * dim + block_size), LINE):
            prefetch(ahead + line, 2)
    shorts, step = spare + _UNITS, 2 * dim
    values = ahead + block_size * dim if ahead != 0 else 0
    _fold(heads, query, 4 * dim, dim, record + facts, spare, ahead, values)
    _score_middles(heads, query, dim, record + facts + 2 * dim, spare + _ADDED)
    for token in range(0, block_size, 8):
        sums = no_sums(heads, 4)
        for d in range(0, dim, 16):
            if ahead != 0 and token > 0:  # `_fold` prefetches for the first 8 tokens
                line = token * dim // 2 + 4 * d
                prefetch(ahead + line, 2)
                prefetch(values + line, 2)
            sums = add_token_dots(sums, record + token * dim + 4 * d, 4 * dim, shorts + 2 * d, step, heads)
        first, second = token_scores(sums, spare)
        store_quads(scores + 4 * token, stride, heads, first)
        store_quads(scores + 4 * (token + 4), stride, heads, second)


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
    """`block.add_weighted` for all keys of a packed record."""
    shorts, step = spare + _UNITS, 2 * max(block_size, 16)
    _fold_weights(heads, weights, stride, block_size, 0, spare)
    octets = shorts + len(heads) * step
    totals = octets + 16 * len(heads) * block_size
    for head in range(len(heads)):
        whole = np.float32(0.0)
        for token in range(block_size):
            whole += get(weights + head * stride + 4 * token)
        put(spare + _ADDED + 4 * head, whole)
        for token in range(0, block_size, 8):
            repeat_octet(shorts + head * step + 2 * token, octets + 16 * (head * block_size + token))
    for d in range(0, dim, 16):
        tile = no_sums(heads, 2)
        for token in range(0, block_size, 8):
            keys = record + token * dim + 4 * d
            tile = add_key_octets(tile, keys, 4 * dim, octets + 16 * token, 16 * block_size, heads)
        for head in range(len(heads)):
            store(totals + 64 * head, splat(np.float32(0.0)))
        add_sums(totals, 64, spare, heads, join_key_sums(tile))
        facts = record + 2 * (block_size * dim + d)
        scales, middles = load(SCALES, facts), load(SCALES, facts + 2 * dim)
        for head in range(len(heads)):
            place = sums + 4 * (head * dim + d)
            known = fma(splat(get(spare + _ADDED + 4 * head)), middles, load_f32(place))
            store(place, fma(load_f32(totals + 64 * head), scales, known))


class Int8Records(NamedTuple):
    """Packed records for kernels (`packed.py`)."""

    record_bytes: int


_TOP = np.float32(3e38)
_CHUNK_BYTES = 1 << 16


@jit_for_python
def _last_line(dim: int, block_size: int) -> int:
    """Where a packed record's last cache line begins."""
    size = 2 * block_size * dim + 2 * (2 * dim + max(block_size, 16))
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
def _inverse(address: int) -> Any:
    """1 / scale of 16 scales, 0 where the scale is 0."""
    scale, zero = load(SCALES, address), splat(np.float32(0.0))
    return choose_less(zero, scale, splat(np.float32(1.0)) / scale, zero)


@jit
def _pack(
    tag: Any, keys: int, values: int, key_step: int, value_step: int, record: int, dim: int, block_size: int, peaks: int
) -> None:
    zero, part = splat(np.float32(0.0)), splat(np.float32(1.0) / np.float32(127.0))
    scales, half = record + 2 * block_size * dim, splat(np.float32(0.5))
    store(record + _last_line(dim, block_size), zero)  # what pads it is saved, too
    for d in range(0, dim, 16):
        column, place = keys + d * tag.itemsize, scales + 2 * (dim + d)
        high = _clean(tag, column)
        low = zero - high  # its negative, so that a maximum finds it
        for token in range(1, block_size):
            x = _clean(tag, column + token * key_step)
            high, low = vmax(high, x), vmax(low, zero - x)
        store_nearest(place, high * half - low * half)
        middle = load(SCALES, place)
        store_upper(scales + 2 * d, vmax(high - middle, low + middle) * part)
        inverse = _inverse(scales + 2 * d)
        for token in range(block_size):
            x = (_clean(tag, column + token * key_step) - middle) * inverse
            store_key_codes(record + key_place(token, d, dim), x)
    scales += 4 * dim
    for token in range(block_size):
        peak = zero
        for d in range(0, dim, 16):
            x = _clean(tag, values + token * value_step + d * tag.itemsize)
            peak = vmax(peak, vmax(x, zero - x))
        put(peaks + 4 * token, lane_max(peak))
    for token in range(0, block_size, 16):
        store_upper(scales + 2 * token, load_f32(peaks + 4 * token) * part)
        store(peaks + 4 * token, _inverse(scales + 2 * token))
    for token in range(0, block_size, 2):
        even, odd = splat(get(peaks + 4 * token)), splat(get(peaks + 4 * token + 4))
        for d in range(0, dim, 16):
            place = values + token * value_step + d * tag.itemsize
            x, y = _clean(tag, place) * even, _clean(tag, place + value_step) * odd
            store_value_codes(record + value_place(token, d, dim, block_size), x, y)


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
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        for i in range(task * chunk, min((task + 1) * chunk, records.shape[0])):
            _pack(tag, keys[i], values[i], key_step, value_step, records[i], dim, block_size, address_of(peaks))
        count_up(ticket, 1)
    hold(peaks)


@jit
def _unpack(tag: Any, address: int, key: int, value: int, token: int, count: int, dim: int, block_size: int) -> None:
    """Write `count` tokens from `token` on of a record, packed or not, as float32 [count, D]."""
    if not is_packed(address):
        size = dim * tag.itemsize
        for place in range(0, count * dim, 16):
            at = address + token * size + place * tag.itemsize
            store(key + 4 * place, load(tag, at))
            store(value + 4 * place, load(tag, at + block_size * size))
        return
    record = address - 1
    scales = record + 2 * block_size * dim
    for i in range(count):
        share = splat(get_upper(scales + 2 * (2 * dim + token + i)))
        for d in range(0, dim, 16):
            at = 4 * (i * dim + d)
            codes = load_key_codes(record + key_place(token + i, d, dim))
            store(key + at, fma(codes, load(SCALES, scales + 2 * d), load(SCALES, scales + 2 * (dim + d))))
            store(value + at, load_value_codes(record + value_place(token + i, d, dim, block_size)) * share)


READERS[Int8Records] = Reader(_score, _add_values, _add_keys, _unpack, _spare_bytes)


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
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        for i in range(task * chunk, min((task + 1) * chunk, records.shape[0])):
            _unpack(tag, records[i], keys[i], values[i], tokens[i], counts[i], dim, block_size)
        count_up(ticket, 1)


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
