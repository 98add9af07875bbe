"""Scores and weighted sums of one record (block, KV head), packed (`packed.py`) or not, as its address says.

`packed` is None for pools without packed blocks; their kernels are compiled without that branch.
"""

from __future__ import annotations

from typing import Any

from hf_offload.cpu.kernels.block import add_block, score_block
from hf_offload.cpu.kernels.packed import add_packed_keys, add_packed_values, is_packed, score_packed
from hf_offload.cpu.launch import Array, jit
from hf_offload.cpu.memory import PAGE, prefetch


@jit
def record_of(block: int, h: int, record: int, packed: Any) -> int:
    """Address of KV head h's record in a block."""
    if packed is not None and is_packed(block):
        return block + h * int(packed.record_bytes)
    return block + h * record


@jit
def touch(tag: Any, address: int, dim: int, block_size: int, packed: Any) -> None:
    """Prefetch one line of each page of a record.

    The first access to a page stalls on its address translation, and later accesses queue behind it; prefetched for
    several records at once, the translations overlap. (A virtual machine may not get real huge pages.)
    """
    size = 2 * block_size * dim * tag.itemsize
    if packed is not None and is_packed(address):
        size = packed.record_bytes
    for page in range(0, size, PAGE):
        prefetch(address + page, 2)


@jit
def score_keys(
    tag: Any, heads: Any, address: int, ahead: int, query: int, dim: int, block_size: int, scores: int, stride: int,
    packed: Any, spare: int,
) -> None:  # fmt: skip
    """`block.score_block` for a record."""
    if packed is not None and is_packed(address):
        score_packed(packed, heads, address - 1, ahead, query, dim, block_size, scores, stride, spare)
    else:
        score_block(tag, heads, address, ahead, query, dim, block_size, scores, stride)


@jit
def add_vectors(
    tag: Any, heads: Any, address: int, part: int, ahead: int, dim: int, block_size: int, weights: int, stride: int,
    sums: int, valid: Array, begin: int, filled: int, masked: bool, packed: Any, spare: int,
) -> None:  # fmt: skip
    """`block.add_block` for the values (part 0) or the keys (part 1) of a record."""
    if packed is not None and is_packed(address):
        if part == 0:
            add_packed_values(packed, heads, address - 1, ahead, dim, block_size, weights, stride, sums, spare)
        else:
            add_packed_keys(packed, heads, address - 1, dim, block_size, weights, stride, sums, spare)
    else:
        offset = block_size * dim * tag.itemsize if part == 0 else 0
        add_block(
            tag, heads, address + offset, ahead, dim, block_size, weights, stride, sums, valid, begin, filled, masked
        )
