"""Records (block, KV head) in host memory: where they are, their scores and weighted sums, packed (`packed.py`) or not.

`packed` is None for pools without packed blocks; their kernels are compiled without that branch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_offload.cpu.kernels.block import add_block, score_block
from hf_offload.cpu.kernels.packed import add_packed_keys, add_packed_values, is_packed, score_packed
from hf_offload.cpu.launch import I32, I64, U8, Array, borrowing, check_geometry, jit, require
from hf_offload.cpu.memory import PAGE, prefetch


class HostBlocks(NamedTuple):
    """Rows of tokens in blocks of host memory, as kernels read them.

    Args:
        tag: `launch.tag_of` the pool's dtype.
        block_ptr: int64 [P], address of each physical block: [Hkv] records [2 (K, V), block_size, D], or packed ones,
            marked in the lowest bit.
        table: int32 [B, N], physical block of each logical one.
        holes: uint8 [B, N], 1 where a filled token of the block is not valid.
        valid: uint8 [B, T], 1 where the token may be attended (read only in blocks with holes and in the last one).
        block_size: tokens of a block: 8, 16, 32, 64 or 128.
        packed: how packed blocks are read (`packed.py`), or None: no block is packed.
    """

    tag: Array
    block_ptr: Array
    table: Array
    holes: Array
    valid: Array
    block_size: int
    packed: Any = None

    def check(self, batch: int, dim: int, length: int) -> None:
        """Raise unless the arrays hold `batch` rows of `length` tokens with vectors of size `dim`."""
        check_geometry(dim, self.block_size)
        require("block_ptr", self.block_ptr, I64, self.block_ptr.shape[:1])
        require("table", self.table, I32, (batch, self.table.shape[-1]))
        require("holes", self.holes, U8, (batch, self.holes.shape[-1]))
        require("valid", self.valid, U8, (batch, self.valid.shape[-1]))
        covered = min(self.valid.shape[1], self.holes.shape[1] * self.block_size)
        if not 0 <= length <= covered:
            raise ValueError(f"length {length} is not within 0..{covered}, the tokens that valid and holes cover")


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


@borrowing
def score_keys(
    heads: Any, done: int, tag: Any, address: int, ahead: int, query: int, dim: int, block_size: int, scores: int,
    stride: int, packed: Any, spare: int,
) -> None:  # fmt: skip
    """`block.score_block` of a record for a register tile of heads, from head `done` on (`launch.by_tiles`)."""
    query, scores, ahead = query + 4 * done * dim, scores + done * stride, ahead if done == 0 else 0
    if packed is not None and is_packed(address):
        score_packed(packed, heads, address - 1, ahead, query, dim, block_size, scores, stride, spare)
    else:
        score_block(tag, heads, address, ahead, query, dim, block_size, scores, stride)


@borrowing
def add_vectors(
    heads: Any, done: int, tag: Any, address: int, part: int, ahead: int, dim: int, block_size: int, weights: int,
    stride: int, sums: int, valid: Array, begin: int, filled: int, masked: bool, packed: Any, spare: int,
) -> None:  # fmt: skip
    """`block.add_block` of the values (part 0) or the keys (part 1) of a record; heads, done: as in `score_keys`."""
    weights, sums, ahead = weights + done * stride, sums + 4 * done * dim, ahead if done == 0 else 0
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
