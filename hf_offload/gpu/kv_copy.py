"""Copies of KV between host records and the slots of a pool.

Shapes: pool [B, Hkv, R, 2 (K, V), block_size, D]; a record of (block, KV head h) lies in host memory at
block_ptr[table[row, block]] + h * record_bytes, K then V. Kernels reach pinned host memory by its address.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import no_type_check

import torch

from .backend import FLOATS, ON_TRITON, jit, next_power_of_2, require, tl

BLOCK_SIZES = (8, 16, 32, 64, 128)
FETCHERS = 24
"""Programs of a fetch, whatever it moves. They fill the bus: 24 times 8 KiB are under way, twice what a round trip of
1.5 µs at 55 GB/s holds. More would only hold places of a multiprocessor while they wait for the bus, and kernels of the
model, which come later, would wait behind them."""
_TILE_BYTES = 8192  # what one program moves: 64 bytes for each of its 128 threads


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where things lie in an int8 record, behind its codes.

    Codes of K come first, `[block_size, D]`, then those of V, `[block_size / 2, D, 2]` (of 2 tokens).

    Args:
        record_bytes: bytes of the packed record of one block and KV head.
        words: offset in bytes of D words of two bfloat16: high the scale of a channel of the keys, low its middle.
        value_scales: offset in bytes of the scales of the values, bfloat16 [block_size] or more.
    """

    record_bytes: int
    words: int
    value_scales: int


def write_token(
    pool: torch.Tensor, slot_of: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limits: torch.Tensor
) -> None:
    """Write the newest token, position limits[0] - 1, into the slot of its block; nothing where that has no slot.

    Args:
        pool: `[B, Hkv, R, 2, block_size, D]`, contiguous, written.
        slot_of: `[B, Hkv, N]` int32, slot of each logical block, -1 = not resident.
        k: `[B, Hkv, D]` in the pool's dtype; the last dimension contiguous, other strides free.
        v: the same for the values.
        limits: `[2]` int32, (tokens of every row, this one included; sealed blocks).

    Raises:
        ValueError: shapes or strides that do not fit.
        TypeError: an unexpected dtype.
    """
    batch, heads, slots, size, dim = _check_pool(pool)
    require(
        pool.device,
        slot_of=(slot_of, (torch.int32,), (batch, heads, slot_of.shape[-1])),
        limits=(limits, (torch.int32,), (2,)),
    )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != pool.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}; the pool has {pool.dtype}")
        if x.shape != (batch, heads, dim) or x.stride(2) != 1:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, strides {x.stride()}; needed {(batch, heads, dim)}, stride 1"
            )
    if pool.device.type not in ON_TRITON:
        _write_token_by_torch(pool, slot_of, k, v, limits)
        return
    if batch:
        write_token_kernel[(batch * heads,)](
            pool, slot_of, k, v, limits, k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads, slots,
            slot_of.shape[2], SIZE=size, D=dim, WIDTH=next_power_of_2(dim), num_warps=1,
        )  # fmt: skip


def fetch(
    pool: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    block_ptr: torch.Tensor,
    table: torch.Tensor,
    *,
    packed: PackedLayout | None,
) -> None:
    """Copy blocks from host memory into slots.

    Args:
        pool: `[B, Hkv, R, 2, block_size, D]`, contiguous, written.
        slots: `[B, Hkv, M]` int32, where each block goes.
        blocks: `[B, Hkv, M]` int32, logical blocks.
        counts: `[B, Hkv]` int32, how many of the M moves there are; what stands behind them is not looked at.
        block_ptr: `[P]` int64, address of each physical block, in memory that is pinned if the pool is on a GPU.
        table: `[B, N]` int32, physical block of each logical one.
        packed: how int8 blocks lie; their addresses have a 1 in the lowest bit. None: there are none.

    Raises:
        ValueError: shapes or strides that do not fit, or a layout that is not aligned.
        TypeError: an unexpected dtype.
    """
    batch, heads, slots_each, size, dim = _check_pool(pool)
    moves = slots.shape[-1]
    require(
        pool.device,
        slots=(slots, (torch.int32,), (batch, heads, moves)),
        blocks=(blocks, (torch.int32,), (batch, heads, moves)),
        counts=(counts, (torch.int32,), (batch, heads)),
    )
    _check_host(block_ptr, table, batch)
    if packed is not None and (packed.record_bytes % 16 or packed.words % 16 or packed.value_scales % 16):
        raise ValueError(f"{packed} is not aligned: all of these must be multiples of 16 bytes")
    if pool.device.type not in ON_TRITON:
        _fetch_by_torch(pool, slots, blocks, counts, block_ptr, table, packed)
        return
    if not slots.numel():
        return
    listing = (pool, slots, blocks, counts, block_ptr, table, batch * heads, heads, slots_each, moves, table.shape[1])
    lines = next_power_of_2(batch * heads)
    if packed is None:
        fetch_kernel[(FETCHERS,)](
            *listing, LINES=lines, **pieces(size, dim, pool.dtype.itemsize), num_warps=4, num_stages=1
        )
        return
    tokens, width = tile(size, dim, pool.dtype.itemsize)
    fetch_packed_kernel[(FETCHERS // 2, 2)](
        *listing, LINES=lines, SIZE=size, D=dim, WIDTH=width, TOKENS=tokens, RECORD=_record_bytes(pool),
        PACKED=packed.record_bytes, WORDS=packed.words, VALUE_SCALES=packed.value_scales,
        TOP=torch.finfo(pool.dtype).max, num_warps=4, num_stages=1,
    )  # fmt: skip


def store_block(
    pool: torch.Tensor, slot_of: torch.Tensor, block: int, block_ptr: torch.Tensor, table: torch.Tensor
) -> None:
    """Copy one logical block of every row and KV head from its slot into its host record; nothing where it has no slot.

    The host may read the records when it has waited for the stream, or for the flag of a hand-over behind this call.

    Args:
        pool: `[B, Hkv, R, 2, block_size, D]`, contiguous.
        slot_of: `[B, Hkv, N]` int32, slot of each logical block, -1 = not resident.
        block: the logical block; its records are not packed.
        block_ptr, table: as in `fetch`.

    Raises:
        ValueError: shapes or strides that do not fit, or a block beyond them.
        TypeError: an unexpected dtype.
    """
    batch, heads, slots, size, dim = _check_pool(pool)
    require(pool.device, slot_of=(slot_of, (torch.int32,), (batch, heads, slot_of.shape[-1])))
    _check_host(block_ptr, table, batch)
    if not 0 <= block < min(slot_of.shape[2], table.shape[1]):
        raise ValueError(f"block {block} is beyond slot_of {tuple(slot_of.shape)} or table {tuple(table.shape)}")
    if pool.device.type not in ON_TRITON:
        _store_block_by_torch(pool, slot_of, block, block_ptr, table)
        return
    tokens, width = tile(size, dim, pool.dtype.itemsize)
    if batch:
        store_block_kernel[(batch * heads, 2 * size // tokens)](
            pool, slot_of, block_ptr, table, block, heads, slots, slot_of.shape[2], table.shape[1],
            SIZE=size, D=dim, WIDTH=width, TOKENS=tokens, RECORD=_record_bytes(pool), num_warps=4,
        )  # fmt: skip


def store_tokens(
    k: torch.Tensor, v: torch.Tensor, block_ptr: torch.Tensor, table: torch.Tensor, first: int, block_size: int
) -> None:
    """Write new tokens first … first + T - 1 of every row into their host records.

    The host may read the records when it has waited for the stream.

    Args:
        k: `[B, Hkv, T, D]` in the records' dtype; the last dimension contiguous, other strides free.
        v: the same for the values.
        block_ptr, table: as in `fetch`, on the device of `k`; the blocks of these tokens are not packed.
        first: position of the first token, the same in every row; may lie inside a block.
        block_size: tokens of a block.

    Raises:
        ValueError: shapes or strides that do not fit, or tokens beyond the table.
        TypeError: an unexpected dtype.
    """
    if k.dim() != 4 or k.stride(3) != 1:
        raise ValueError(f"k has shape {tuple(k.shape)}, strides {k.stride()}; expected [B, Hkv, T, D], last stride 1")
    batch, heads, tokens, dim = k.shape
    _check_geometry(block_size, dim)
    if k.dtype not in FLOATS:
        raise TypeError(f"k has dtype {k.dtype}; expected one of {FLOATS}")
    if v.dtype != k.dtype:
        raise TypeError(f"v has dtype {v.dtype}; k has {k.dtype}")
    if v.shape != k.shape or v.stride(3) != 1 or v.device != k.device:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, strides {v.stride()} on {v.device}; k has {tuple(k.shape)} on {k.device}, "
            "and the last stride must be 1"
        )
    _check_host(block_ptr, table, batch, k.device)
    if first < 0 or first + tokens > table.shape[1] * block_size:
        raise ValueError(f"tokens {first}..{first + tokens} exceed the table's {table.shape[1] * block_size}")
    if k.device.type not in ON_TRITON:
        _store_tokens_by_torch(k, v, block_ptr, table, first, block_size)
        return
    in_tile, width = tile(block_size, dim, k.dtype.itemsize)
    blocks = -(-(first + tokens) // block_size) - first // block_size
    if k.numel():
        store_tokens_kernel[(blocks * batch * heads, block_size // in_tile)](
            k, v, block_ptr, table, first, first + tokens, *k.stride()[:3], *v.stride()[:3], batch * heads, heads,
            table.shape[1], SIZE=block_size, D=dim, WIDTH=width, TOKENS=in_tile,
            RECORD=2 * block_size * dim * k.dtype.itemsize, num_warps=4,
        )  # fmt: skip


def tile(size: int, dim: int, element_bytes: int) -> tuple[int, int]:
    """Tokens of the tile of a record that one program moves, and the width that it is padded to."""
    width = next_power_of_2(dim)
    return min(size, _TILE_BYTES // (width * element_bytes)), width


def pieces(size: int, dim: int, element_bytes: int) -> dict[str, int]:
    """The compile-time sizes of a fetch: elements of a record, of a piece of it, and pieces of a tile."""
    record, most = 2 * size * dim, _TILE_BYTES // element_bytes
    piece = min(record & -record, most)  # a power of two that divides it
    return {"RECORD": record, "PIECE": piece, "PIECES": most // piece, "ELEMENT": element_bytes}


def _record_bytes(pool: torch.Tensor) -> int:
    return 2 * pool.shape[4] * pool.shape[5] * pool.dtype.itemsize


def _check_pool(pool: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Batch, KV heads, slots, block size and head dimension of a pool."""
    if pool.dim() != 6 or pool.shape[3] != 2 or not pool.is_contiguous():
        raise ValueError(f"the pool has shape {tuple(pool.shape)}; expected a contiguous [B, Hkv, R, 2, block_size, D]")
    batch, heads, slots, _, size, dim = pool.shape
    _check_geometry(size, dim)
    if pool.dtype not in FLOATS:
        raise TypeError(f"the pool has dtype {pool.dtype}; expected one of {FLOATS}")
    return batch, heads, slots, size, dim


def _check_geometry(size: int, dim: int) -> None:
    if size not in BLOCK_SIZES:
        raise ValueError(f"block_size {size} is not one of {BLOCK_SIZES}")
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(f"head dimension {dim} is not a multiple of 16 in 16..256")


def _check_host(block_ptr: torch.Tensor, table: torch.Tensor, batch: int, device: torch.device | None = None) -> None:
    require(
        device,
        block_ptr=(block_ptr, (torch.int64,), (block_ptr.shape[0],)),
        table=(table, (torch.int32,), (batch, table.shape[-1])),
    )


def _write_token_by_torch(
    pool: torch.Tensor, slot_of: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limits: torch.Tensor
) -> None:
    block, offset = divmod(int(limits[0]) - 1, pool.shape[4])
    if not 0 <= block < slot_of.shape[2]:
        return
    slots = slot_of[:, :, block].long()
    rows, heads = (slots >= 0).nonzero(as_tuple=True)
    pool[rows, heads, slots[rows, heads], :, offset] = torch.stack((k, v), 2)[rows, heads]


def _fetch_by_torch(
    pool: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, block_ptr: torch.Tensor,
    table: torch.Tensor, packed: PackedLayout | None,
) -> None:  # fmt: skip
    moved = torch.arange(slots.shape[2], device=slots.device) < counts[:, :, None]
    rows, heads, moves = moved.nonzero(as_tuple=True)
    chosen = (rows, heads, moves)
    addresses = block_ptr[table[rows, blocks[chosen].long()].long()]
    shape = tuple(pool.shape[3:])
    for row, head, slot, address in zip(rows, heads, slots[chosen].long(), addresses.tolist(), strict=True):
        if packed is not None and address % 2:
            pool[row, head, slot] = _unpack(address - 1 + int(head) * packed.record_bytes, packed, shape, pool.dtype)
        else:
            pool[row, head, slot] = _view(address + int(head) * _record_bytes(pool), shape, pool.dtype)


def _unpack(address: int, packed: PackedLayout, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size, dim = shape[1:]
    keys = _view(address, (size, dim), torch.int8)
    values = _view(address + size * dim, (size // 2, dim, 2), torch.int8).transpose(1, 2).reshape(size, dim)
    middles, key_scales = _view(address + packed.words, (dim, 2), torch.bfloat16).float().unbind(1)
    value_scales = _view(address + packed.value_scales, (size, 1), torch.bfloat16).float()
    top = torch.finfo(dtype).max
    return torch.stack((keys * key_scales + middles, values * value_scales)).clamp(-top, top).to(dtype)


def _store_block_by_torch(
    pool: torch.Tensor, slot_of: torch.Tensor, block: int, block_ptr: torch.Tensor, table: torch.Tensor
) -> None:
    slots = slot_of[:, :, block]
    addresses = block_ptr[table[:, block].long()].tolist()
    for row, head in (slots >= 0).nonzero().tolist():
        record = _view(addresses[row] + head * _record_bytes(pool), tuple(pool.shape[3:]), pool.dtype)
        record.copy_(pool[row, head, int(slots[row, head])])


def _store_tokens_by_torch(
    k: torch.Tensor, v: torch.Tensor, block_ptr: torch.Tensor, table: torch.Tensor, first: int, block_size: int
) -> None:
    _, heads, tokens, dim = k.shape
    begin = first
    while begin < first + tokens:
        block, offset = divmod(begin, block_size)
        end = min((block + 1) * block_size, first + tokens)
        for row, address in enumerate(block_ptr[table[:, block].long()].tolist()):
            records = _view(address, (heads, 2, block_size, dim), k.dtype)
            for part, x in enumerate((k, v)):
                records[:, part, offset : offset + end - begin] = x[row, :, begin - first : end - first]
        begin = end


def _view(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address as a tensor; its owner must outlive the tensor."""
    count = torch.Size(shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


@jit
@no_type_check
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
    in_record = channel < D
    record = line.to(tl.int64) * slots + slot
    at = pool + record * (2 * SIZE * D) + position % SIZE * D + channel
    tl.store(at, tl.load(k + row * k_row + head * k_head + channel, mask=in_record), mask=in_record)
    tl.store(at + SIZE * D, tl.load(v + row * v_row + head * v_head + channel, mask=in_record), mask=in_record)


@jit(do_not_specialize=["lines", "width"])
@no_type_check
def fetch_kernel(
    pool, into, chosen, counts, block_ptr, table,
    lines, heads, slots, moves, width,
    LINES: tl.constexpr, RECORD: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Programs take tiles of PIECES pieces in turn: PIECE elements each of a record of RECORD, over all (row, KV head).

    Where the next tile's pieces lie is looked up while this tile's are on their way.
    """
    piece, inside = tl.arange(0, PIECES), tl.arange(0, PIECE)
    number = tl.arange(0, LINES)
    ends = tl.cumsum(tl.load(counts + number, mask=number < lines, other=0), 0)
    tiles = tl.cdiv(tl.max(ends, 0) * (RECORD // PIECE), PIECES)
    listing = (into, chosen, block_ptr, table, ends, heads, slots, moves, width)
    tile = tl.program_id(0)
    source, target, in_piece = _find_pieces(tile * PIECES + piece, listing, LINES, RECORD, PIECE, ELEMENT)
    while tile < tiles:
        content = tl.load(
            tl.multiple_of(source.to(pool.dtype), [16])[:, None] + inside[None, :], mask=in_piece[:, None], other=0
        )
        offset, stored = target, in_piece
        tile += tl.num_programs(0)
        source, target, in_piece = _find_pieces(tile * PIECES + piece, listing, LINES, RECORD, PIECE, ELEMENT)
        tl.store(pool + offset[:, None] + inside[None, :], content, mask=stored[:, None])


@jit
@no_type_check
def _find_pieces(piece, listing, LINES: tl.constexpr, RECORD: tl.constexpr, PIECE: tl.constexpr, ELEMENT: tl.constexpr):
    """Addresses of pieces `[n]` on the host, their offsets in the pool, and whether they are any."""
    into, chosen, block_ptr, table, ends, heads, slots, moves, width = listing
    work, first = piece // (RECORD // PIECE), piece % (RECORD // PIECE) * PIECE
    in_range = work < tl.max(ends, 0)
    past = ends[None, :] <= work[:, None]
    line = tl.minimum(tl.sum(past.to(tl.int32), 1), LINES - 1)
    move = line.to(tl.int64) * moves + work - tl.max(tl.where(past, ends[None, :], 0), 1)
    slot = tl.load(into + move, mask=in_range, other=0)
    block = tl.load(chosen + move, mask=in_range, other=0)
    physical = tl.load(table + (line // heads).to(tl.int64) * width + block, mask=in_range, other=0)
    address = tl.load(block_ptr + physical, mask=in_range, other=0)
    source = address + ((line % heads).to(tl.int64) * RECORD + first) * ELEMENT
    target = (line.to(tl.int64) * slots + slot) * RECORD + first
    return source, tl.multiple_of(target, [16]), in_range


@jit(do_not_specialize=["lines"])
@no_type_check
def fetch_packed_kernel(
    pool, into, chosen, counts, block_ptr, table,
    lines, heads, slots, moves, width,
    LINES: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    RECORD: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr, VALUE_SCALES: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """As `fetch_kernel`, of records that may be packed, in tiles [TOKENS, D]: half of the programs take keys."""
    tiles: tl.constexpr = SIZE // TOKENS
    part, token, channel = tl.program_id(1), tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    in_record = (channel < D)[None, :]
    number = tl.arange(0, LINES)
    ends = tl.cumsum(tl.load(counts + number, mask=number < lines, other=0), 0)
    for tile in range(tl.program_id(0), tl.max(ends, 0) * tiles, tl.num_programs(0)):
        work, first = tile // tiles, tile % tiles * TOKENS
        line = tl.sum((ends <= work).to(tl.int32), 0)
        before = tl.max(tl.where(number < line, ends, 0), 0)
        move = line.to(tl.int64) * moves + work - before
        row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
        slot = tl.load(into + move)
        address = tl.load(block_ptr + tl.load(table + row * width + tl.load(chosen + move)))
        offset = part * (SIZE * D) + (first + token)[:, None] * D + channel[None, :]
        target = pool + (line.to(tl.int64) * slots + slot) * (2 * SIZE * D)
        plain = _aligned(address + head * RECORD, pool.dtype.element_ty)
        if address % 2 == 0:
            _copy(plain, target, offset, in_record)
        else:
            record = _aligned(address - 1 + head * PACKED, tl.int8)
            if part == 0:
                words = (record + WORDS).to(tl.pointer_type(tl.int32)) + channel
                word = tl.load(words, mask=channel < D, other=0)[None, :]
                content = tl.load(record + offset, mask=in_record, other=0).to(tl.float32) * _widen(word >> 16)
                content += _widen(word)
            else:
                value_scales = (record + VALUE_SCALES).to(tl.pointer_type(tl.int16)) + first + token
                codes = _codes_of_values(record + SIZE * D, first, D, WIDTH, TOKENS).to(tl.float32)
                content = codes * _widen(tl.load(value_scales))[:, None]
            content = tl.minimum(tl.maximum(content, -TOP), TOP)
            tl.store(target + offset, content.to(pool.dtype.element_ty), mask=in_record)


@jit(do_not_specialize=["block"])
@no_type_check
def store_block_kernel(
    pool, slot_of, block_ptr, table, block,
    heads, slots, blocks, width,
    SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One program = one tile [TOKENS, D] of the keys (even second number) or values (odd) of one row and KV head."""
    line = tl.program_id(0)
    slot = tl.load(slot_of + line.to(tl.int64) * blocks + block)
    if slot < 0:
        return
    row, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    address = tl.load(block_ptr + tl.load(table + row * width + block))
    part, token = tl.program_id(1) % 2, tl.program_id(1) // 2 * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    offset = part * (SIZE * D) + token[:, None] * D + channel[None, :]
    source = pool + (line.to(tl.int64) * slots + slot) * (2 * SIZE * D)
    _copy(source, _aligned(address + head * RECORD, pool.dtype.element_ty), offset, (channel < D)[None, :])


@jit(do_not_specialize=["first", "stop", "lines", "width"])
@no_type_check
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
    in_block = ((position >= first) & (position < stop))[:, None] & (channel < D)[None, :]
    new = (position - first).to(tl.int64)[:, None]
    address = tl.load(block_ptr + tl.load(table + row * width + block))
    target = _aligned(address + head * RECORD, k.dtype.element_ty) + inside[:, None] * D + channel[None, :]
    keys = k + row * k_row + head * k_head + new * k_token + channel[None, :]
    values = v + row * v_row + head * v_head + new * v_token + channel[None, :]
    tl.store(target, tl.load(keys, mask=in_block), mask=in_block)
    tl.store(target + SIZE * D, tl.load(values, mask=in_block), mask=in_block)


@jit
@no_type_check
def _aligned(address, kind: tl.constexpr):
    """A pointer that the compiler may take for a multiple of 16 bytes: without that it loads element by element."""
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@jit
@no_type_check
def _copy(source, target, offset, mask):
    tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)


@jit
@no_type_check
def _widen(bits):
    """bfloat16 as float32, by its bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
@no_type_check
def _codes_of_values(codes, first, D: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Int8 codes [TOKENS, WIDTH], which lie as [TOKENS / 2, D, 2] and are read in that order."""
    pair, column = first // 2 + tl.arange(0, TOKENS // 2)[:, None], tl.arange(0, 2 * WIDTH)[None, :]
    read = tl.load(codes + pair * (2 * D) + column, mask=column < 2 * D, other=0)
    turned = tl.permute(tl.reshape(read, (TOKENS // 2, WIDTH, 2)), (0, 2, 1))
    return tl.reshape(turned, (TOKENS, WIDTH))
