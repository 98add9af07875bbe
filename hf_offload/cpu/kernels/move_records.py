"""Byte copies between K/V tensors and blocks of the pool, of any dtype.

A block is `[Hkv, 2 (K, V), block_size, D]`; tensors are `[B, Hkv, T, D]` with a contiguous last dimension and any other
strides.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_offload.cpu.launch import BLOCK_SIZES, I32, I64, Array, Launch, kernel, require
from hf_offload.cpu.memory import LINE, copy_bytes, count_up, next_task, prefetch

_CHUNK_TOKENS = 256  # tokens of a task: large against its overhead, small enough to share a prefill among threads
_CHUNK_BYTES = 1 << 18


@kernel
def move_kernel(
    ticket: Array,
    tasks: int,
    into_pool: bool,
    keys: int,
    values: int,
    key_strides: tuple[int, int, int],
    value_strides: tuple[int, int, int],
    heads: int,
    tokens: int,
    row: int,
    start: int,
    block_size: int,
    block_ptr: Array,
    table: Array,
) -> None:
    """One task = up to 256 tokens of one row, all heads; sizes and strides in bytes."""
    chunks = (tokens + _CHUNK_TOKENS - 1) // _CHUNK_TOKENS
    half = block_size * row
    task = count_up(ticket, 0)
    while task < tasks:
        b, chunk = task // chunks, task % chunks
        token = chunk * _CHUNK_TOKENS
        end = min(token + _CHUNK_TOKENS, tokens)
        while token < end:
            slot = (start + token) % block_size
            count = min(block_size - slot, end - token)
            record = block_ptr[table[b, (start + token) // block_size]] + slot * row
            for h in range(heads):
                for part in range(2):
                    strides = value_strides if part else key_strides
                    address = record + (2 * h + part) * half
                    tensor = (values if part else keys) + b * strides[0] + h * strides[1] + token * strides[2]
                    run = count if strides[2] == row else 1  # tokens that are contiguous on both sides
                    for i in range(0, count, run):
                        if into_pool:
                            copy_bytes(address + i * row, tensor + i * strides[2], run * row)
                        else:
                            copy_bytes(tensor + i * strides[2], address + i * row, run * row)
            token += count
        task = next_task(ticket)


@kernel
def copy_kernel(ticket: Array, tasks: int, source: Array, target: Array, nbytes: int, chunk: int) -> None:
    """One task = `chunk` records."""
    task = count_up(ticket, 0)
    while task < tasks:
        for i in range(task * chunk, min((task + 1) * chunk, source.shape[0])):
            copy_bytes(target[i], source[i], nbytes)
        task = next_task(ticket)


@kernel
def touch_kernel(ticket: Array, tasks: int, addresses: Array, nbytes: int, chunk: int) -> None:
    """One task = `chunk` records."""
    task = count_up(ticket, 0)
    while task < tasks:
        for i in range(task * chunk, min((task + 1) * chunk, addresses.shape[0])):
            for line in range(0, nbytes, LINE):
                prefetch(addresses[i] + line, 2)
        task = next_task(ticket)


def layout_of(x: Array | torch.Tensor) -> tuple[int, tuple[int, ...], int]:
    """Address, strides in bytes and element size; much cheaper from a tensor than through its NumPy array."""
    if isinstance(x, torch.Tensor):
        size = x.element_size()
        return x.data_ptr(), tuple([stride * size for stride in x.stride()]), size
    return x.ctypes.data, x.strides, x.itemsize


def _move(
    into_pool: bool,
    k: Array | torch.Tensor,
    v: Array | torch.Tensor,
    block_ptr: Array,
    table: Array,
    start: int,
    block_size: int,
) -> Launch:
    batch, heads, tokens, dim = k.shape
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"k is {k.dtype} {k.shape} but v is {v.dtype} {v.shape}; they must agree")
    key, key_strides, size = layout_of(k)
    value, value_strides, _ = layout_of(v)
    if dim > 1 and (key_strides[3] != size or value_strides[3] != size):
        raise ValueError("k and v need a contiguous last dimension")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size} is not one of {BLOCK_SIZES}")
    if start < 0 or start + tokens > table.shape[1] * block_size:
        capacity = table.shape[1] * block_size
        raise ValueError(f"tokens {start}..{start + tokens} exceed the table's {capacity}; map more blocks first")
    if not into_pool and not all(isinstance(x, torch.Tensor) or x.flags.writeable for x in (k, v)):
        raise ValueError("the arrays to gather into must be writable")
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[1]))
    args = (
        into_pool, key, value, key_strides[:3], value_strides[:3], heads, tokens, dim * size, int(start),
        int(block_size), block_ptr, table,
    )  # fmt: skip
    chunks = -(-tokens // _CHUNK_TOKENS)
    return Launch(move_kernel, batch * chunks, args, 2 * batch * heads * tokens * dim * size, (k, v))


def write_tokens(
    k: Array | torch.Tensor, v: Array | torch.Tensor, block_ptr: Array, table: Array, start: int, block_size: int
) -> Launch:
    """Prepare the copy of new tokens into their blocks.

    Args:
        k: [B, Hkv, T, D] CPU tensor of the pool's dtype, or array of its bits; last dimension contiguous, other strides
            free.
        v: the same for the values.
        block_ptr: int64 [P], address in bytes of each physical block.
        table: int32 [B, N], physical block of each logical one.
        start: position of the first of the T tokens, the same in every row; may lie inside a block.
        block_size: tokens of a block.

    Raises:
        ValueError: k and v disagree, a stride or size is not covered, or the table ends before the last token.
        TypeError: an array of another dtype.
    """
    return _move(True, k, v, block_ptr, table, start, block_size)


def gather_tokens(
    k_out: Array | torch.Tensor,
    v_out: Array | torch.Tensor,
    block_ptr: Array,
    table: Array,
    first: int,
    block_size: int,
) -> Launch:
    """Prepare the copy of tokens first..first+T-1 out of their blocks, the inverse of `write_tokens`.

    Args:
        k_out: [B, Hkv, T, D] in the pool's dtype, written; last dimension contiguous, other strides free.
        v_out: the same for the values.
        block_ptr: int64 [P], address in bytes of each physical block.
        table: int32 [B, N], physical block of each logical one.
        first: position of the first token, the same in every row.
        block_size: tokens of a block.

    Raises:
        ValueError: as `write_tokens`, or an output is read-only.
        TypeError: an array of another dtype.
    """
    return _move(False, k_out, v_out, block_ptr, table, first, block_size)


def copy_records(src_addr: Array, dst_addr: Array, nbytes: int, keep: tuple[Any, ...] = ()) -> Launch:
    """Prepare the copy of n records of the same size; no source may overlap another record's target.

    Args:
        src_addr: int64 [n], addresses in bytes.
        dst_addr: int64 [n], addresses in bytes.
        nbytes: size of a record in bytes.
        keep: objects whose memory the kernel reaches only by address.

    Raises:
        ValueError: different numbers of addresses, or a memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    require("src_addr", src_addr, I64, src_addr.shape[:1])
    require("dst_addr", dst_addr, I64, src_addr.shape)
    chunk = max(1, _CHUNK_BYTES // max(1, nbytes))
    args: tuple[Any, ...] = (src_addr, dst_addr, int(nbytes), chunk)
    return Launch(copy_kernel, -(-len(src_addr) // chunk), args, len(src_addr) * nbytes, keep)


def touch_records(addr: Array, nbytes: int) -> Launch:
    """Prepare prefetching n records of the same size into the second-level cache of the thread that runs the task.

    Args:
        addr: int64 [n], addresses in bytes.
        nbytes: size of a record in bytes.

    Raises:
        ValueError: a memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    require("addr", addr, I64, addr.shape[:1])
    chunk = max(1, _CHUNK_BYTES // max(1, nbytes))
    args: tuple[Any, ...] = (addr, int(nbytes), chunk)
    return Launch(touch_kernel, -(-len(addr) // chunk), args, len(addr) * nbytes)
