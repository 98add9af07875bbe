"""Triton kernels that move KV between host records and slots; see `move.py` for shapes."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_token_kernel(
    pool, slot_of, k, v, limits,
    k_row, k_head, v_row, v_head, heads, slots, blocks,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program = one row and KV head."""
    line = tl.program_id(0)
    position = tl.load(limits) - 1
    if (position < 0) | (position >= blocks * SIZE):
        return
    slot = tl.load(slot_of + line.to(tl.int64) * blocks + position // SIZE)
    if slot < 0:
        return
    row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    there = channel < D
    record = line.to(tl.int64) * slots + slot
    at = pool + record * (2 * SIZE * D) + position % SIZE * D + channel
    tl.store(at, tl.load(k + row * k_row + head * k_head + channel, mask=there), mask=there)
    tl.store(at + SIZE * D, tl.load(v + row * v_row + head * v_head + channel, mask=there), mask=there)


@triton.jit
def _aligned(address, kind: tl.constexpr):
    """A pointer that the compiler may take for a multiple of 16 bytes: without that it loads element by element."""
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def _tile(TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """What the second program number stands for: keys (0) or values (1), tokens [TOKENS], channels [WIDTH]."""
    which = tl.program_id(1)
    return which % 2, which // 2 * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)


@triton.jit
def _copy(source, target, place, there):
    tl.store(target + place, tl.load(source + place, mask=there), mask=there)


@triton.jit
def _widen(bits):
    """bfloat16 as float32, by its bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fetch_kernel(
    pool, into, chosen, counts, block_ptr, table,
    heads, slots, moves, width,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, RECORD: tl.constexpr,
    PACKED: tl.constexpr, KEY_SCALES: tl.constexpr, VALUE_SCALES: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """One program = one tile [TOKENS, D] of the keys or of the values of one move."""
    move = tl.program_id(0)
    line = move // moves
    if move % moves >= tl.load(counts + line):
        return
    row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    slot = tl.load(into + move)
    address = tl.load(block_ptr + tl.load(table + row * width + tl.load(chosen + move)))
    part, token, channel = _tile(TOKENS, WIDTH)
    there = (channel < D)[None, :]
    place = part * (SIZE * D) + token[:, None] * D + channel[None, :]
    kind = pool.dtype.element_ty
    target = pool + (line.to(tl.int64) * slots + slot) * (2 * SIZE * D)
    plain = _aligned(address + head * RECORD, kind)
    if PACKED == 0:
        _copy(plain, target, place, there)
    else:
        if address % 2 == 0:
            _copy(plain, target, place, there)
        else:
            record = address - 1 + head * PACKED
            codes = tl.load(_aligned(record, tl.int8) + place, mask=there, other=0).to(tl.float32)
            keys = tl.load(_aligned(record + KEY_SCALES, tl.int16) + channel, mask=channel < D * (1 - part), other=0)
            values = tl.load(_aligned(record + VALUE_SCALES, tl.int16) + token, mask=token < SIZE * part, other=0)
            content = codes * _widen(keys[None, :] | values[:, None])  # only those of this part were loaded
            content = tl.minimum(tl.maximum(content, -TOP), TOP)
            tl.store(target + place, content.to(kind), mask=there)


@triton.jit
def store_block_kernel(
    pool, slot_of, block_ptr, table, block,
    heads, slots, blocks, width,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One program = one tile [TOKENS, D] of the keys or of the values of one row and KV head."""
    line = tl.program_id(0)
    slot = tl.load(slot_of + line.to(tl.int64) * blocks + block)
    if slot < 0:
        return
    row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    address = tl.load(block_ptr + tl.load(table + row * width + block))
    part, token, channel = _tile(TOKENS, WIDTH)
    place = part * (SIZE * D) + token[:, None] * D + channel[None, :]
    source = pool + (line.to(tl.int64) * slots + slot) * (2 * SIZE * D)
    _copy(source, _aligned(address + head * RECORD, pool.dtype.element_ty), place, (channel < D)[None, :])
