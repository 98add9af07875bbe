"""Blocks in int8: codes with a scale a channel for the keys and a scale a token for the values.

A packed record of one (block, KV head) is K codes int8 [block_size / 4, D / 8, 4, 8] (of 4 tokens in 8 dimensions),
V codes int8 [block_size / 2, D, 2] (of 2 tokens), key scales bfloat16 [D], value scales bfloat16 [max(block_size, 16)],
padded to whole cache lines. Keys have channels that are large in every token, values have not: hence the two axes. An
address of a packed record carries a 1 in its lowest bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .launch import I32, I64, Array, Launch, check_geometry, jit, kernel, require, tag_of
from .memory import LINE, address_of, count_up, get, hold, put
from .packed_block import SCALES
from .packed_codes import (
    key_place,
    load_key_codes,
    load_value_codes,
    store_key_codes,
    store_value_codes,
    value_place,
)
from .vector import (
    choose_less,
    get_upper,
    lane_max,
    load,
    load_f32,
    splat,
    store,
    store_upper,
    vmax,
)

_TOP = np.float32(3e38)
_CHUNK_BYTES = 1 << 16


def packed_bytes(dim: int, block_size: int) -> int:
    """Bytes of the packed record of one block and KV head."""
    size = 2 * block_size * dim + 2 * (dim + max(block_size, 16))
    return -(-size // LINE) * LINE


@jit
def is_packed(address: int) -> bool:
    """Whether a block's address is that of a packed one."""
    return address & 1 != 0


@jit
def _clean(tag: Any, address: int) -> Any:
    """16 stored elements; those that are not finite count as 0."""
    x, zero = load(tag, address), splat(np.float32(0.0))
    return choose_less(vmax(x, zero - x), splat(_TOP), x, zero)


@jit
def _inverse(address: int) -> Any:
    """1 / scale of 16 scales, 0 where the scale is."""
    scale, zero = load(SCALES, address), splat(np.float32(0.0))
    return choose_less(zero, scale, splat(np.float32(1.0)) / scale, zero)


@jit
def _pack(
    tag: Any, keys: int, values: int, key_step: int, value_step: int, record: int, dim: int, block_size: int, peaks: int
) -> None:
    zero, part = splat(np.float32(0.0)), splat(np.float32(1.0) / np.float32(127.0))
    scales = record + 2 * block_size * dim
    for d in range(0, dim, 16):
        column = keys + d * tag.itemsize
        peak = zero
        for token in range(block_size):
            x = _clean(tag, column + token * key_step)
            peak = vmax(peak, vmax(x, zero - x))
        store_upper(scales + 2 * d, peak * part)
        inverse = _inverse(scales + 2 * d)
        for token in range(block_size):
            x = _clean(tag, column + token * key_step) * inverse
            store_key_codes(record + key_place(token, d, dim), x)
    scales += 2 * dim
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
        share = splat(get_upper(scales + 2 * (dim + token + i)))
        for d in range(0, dim, 16):
            at = 4 * (i * dim + d)
            codes = load_key_codes(record + key_place(token + i, d, dim))
            store(key + at, codes * load(SCALES, scales + 2 * d))
            store(value + at, load_value_codes(record + value_place(token + i, d, dim, block_size)) * share)


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
    """Prepare packing n full blocks of one KV head each; elements that are not finite become 0.

    Args:
        keys, values: int64 [n], addresses in bytes of each block's first token.
        key_step, value_step: bytes between its tokens.
        records: int64 [n], addresses of the packed records (without the mark in the lowest bit), written.
        kv_dtype: dtype of keys and values.
        dim: head dimension, a multiple of 16 up to 256.
        block_size: tokens of a block.
        keep: objects whose memory is reached by address.

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
    """Prepare reading tokens of n records, packed or not, as float32.

    Args:
        records: int64 [n], addresses as a pool names them.
        tokens: int32 [n], the first token to read.
        counts: int32 [n], how many.
        keys, values: int64 [n], addresses of float32 [count, D], written.
        kv_dtype: dtype of the records that are not packed.
        dim, block_size, keep: as in `pack_records`.

    Raises:
        ValueError: arrays of different lengths, tokens beyond the block, or what the kernel does not cover.
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
