# mypy: ignore-errors
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
def _codes_of_keys(codes, first, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Int8 codes [TOKENS, WIDTH], which lie as [TOKENS / 4, D / 8, 4, 8] and are read in that order."""
    quad, place = first // 4 + tl.arange(0, TOKENS // 4)[:, None], tl.arange(0, 4 * WIDTH)[None, :]
    read = tl.load(codes + quad * (4 * D) + place, mask=place < 4 * D, other=0)
    turned = tl.permute(tl.reshape(read, (TOKENS // 4, WIDTH // 8, 4, 8)), (0, 2, 1, 3))
    return tl.reshape(turned, (TOKENS, WIDTH))


@triton.jit
def _codes_of_values(codes, first, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Int8 codes [TOKENS, WIDTH], which lie as [TOKENS / 2, D, 2] and are read in that order."""
    pair, place = first // 2 + tl.arange(0, TOKENS // 2)[:, None], tl.arange(0, 2 * WIDTH)[None, :]
    read = tl.load(codes + pair * (2 * D) + place, mask=place < 2 * D, other=0)
    turned = tl.permute(tl.reshape(read, (TOKENS // 2, WIDTH, 2)), (0, 2, 1))
    return tl.reshape(turned, (TOKENS, WIDTH))


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
    target = pool + (line.to(tl.int64) * slots + slot) * (2 * SIZE * D)
    plain = _aligned(address + head * RECORD, pool.dtype.element_ty)
    if PACKED == 0:
        _copy(plain, target, place, there)
    else:
        if address % 2 == 0:
            _copy(plain, target, place, there)
        else:
            record, first = _aligned(address - 1 + head * PACKED, tl.int8), tl.program_id(1) // 2 * TOKENS
            if part == 0:
                codes = _codes_of_keys(record, first, D, WIDTH, TOKENS)
            else:
                codes = _codes_of_values(record + SIZE * D, first, D, WIDTH, TOKENS)
            key_scales = (record + KEY_SCALES).to(tl.pointer_type(tl.int16))
            value_scales = (record + VALUE_SCALES).to(tl.pointer_type(tl.int16))
            keys = tl.load(key_scales + channel, mask=channel < D * (1 - part), other=0)
            values = tl.load(value_scales + token, mask=token < SIZE * part, other=0)
            content = codes.to(tl.float32) * _widen(keys[None, :] | values[:, None])  # only those of this part
            content = tl.minimum(tl.maximum(content, -TOP), TOP)
            tl.store(target + place, content.to(pool.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["block"])
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


@triton.jit(do_not_specialize=["first", "stop", "lines", "width"])
def store_tokens_kernel(
    k, v, block_ptr, table, first, stop,
    k_row, k_head, k_token, v_row, v_head, v_token, lines, heads, width,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One program = the keys and values [TOKENS, D] of a part of one block, row and KV head."""
    program = tl.program_id(0)
    line, block = program % lines, first // SIZE + program // lines
    row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    inside, channel = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    position = block * SIZE + inside
    there = ((position >= first) & (position < stop))[:, None] & (channel < D)[None, :]
    new = (position - first).to(tl.int64)[:, None]
    address = tl.load(block_ptr + tl.load(table + row * width + block))
    target = _aligned(address + head * RECORD, k.dtype.element_ty) + inside[:, None] * D + channel[None, :]
    keys = k + row * k_row + head * k_head + new * k_token + channel[None, :]
    values = v + row * v_row + head * v_head + new * v_token + channel[None, :]
    tl.store(target, tl.load(keys, mask=there), mask=there)
    tl.store(target + SIZE * D, tl.load(values, mask=there), mask=there)
