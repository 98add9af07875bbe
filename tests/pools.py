"""Block pools and requests for kernel tests: several slabs, shuffled blocks, poisoned unused memory."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from references import cpu as reference

from hf_offload.blocks.host_pool import HostPool
from hf_offload.cpu.kernels.decode_attention import Pairs, decode_attention
from hf_offload.cpu.kernels.digest_scores import Vectors, vectors
from hf_offload.cpu.kernels.int8_blocks import Int8Records, pack_records, packed_bytes
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.kernels.submean_scores import SubMeans, submeans
from hf_offload.cpu.launch import Launch, jit_for_python, tag_of
from hf_offload.gpu.seal import pack_codes, pack_halves, pack_levels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Numba compiles a kernel for each dtype, tile of query heads and host format, which takes seconds, but for no other
# size. Quick tests have these alone: each branch of a kernel, and each way to read a dtype, in one of them.
TINY = (torch.float32, 2)
"""Dtype, and query heads of a KV head, of `tiny_model`: what nearly all tests compile."""
UNEVEN = (torch.bfloat16, 5)
"""Tiles of three heads and of two."""
HALF = (torch.float16, 3)
_BITS = {torch.float32: torch.float32, torch.float16: torch.int16, torch.bfloat16: torch.uint16}


def for_python(*functions: Any) -> tuple[Any, ...]:
    """Functions that serve compiled code, compiled again for calls from Python."""
    return tuple([jit_for_python(function.py_func) for function in functions])


def used_blocks(pool: HostPool) -> int:
    """Number of physical blocks with a reference."""
    pool._collect()
    return pool.num_blocks - len(pool._free)


def used_bytes(pool: HostPool) -> int:
    """Bytes of the blocks with a reference, each counted once."""
    pool._collect()
    return sum((slabs.records - len(slabs.free)) * slabs.nbytes for slabs in (pool._plain, pool._packed))


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as the array that kernels take."""
    return tensor.view(_BITS[tensor.dtype]).numpy()


def run(launch: Launch, threads: int = 1) -> None:
    """Run a launch on this thread and on `threads - 1` others."""
    launch.open(threads)
    helpers = [threading.Thread(target=launch.take_part) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    launch.take_part()
    for helper in helpers:
        helper.join()
    launch.check()


@dataclass
class Case:
    """A filled pool with its tables; unused slots and invalid tokens are NaN in `slabs`, 0 in `clean`."""

    slabs: list[torch.Tensor]
    clean: torch.Tensor  # [P, Hkv, 2, block_size, D]
    block_ptr: np.ndarray[Any, Any]
    table: torch.Tensor
    valid: torch.Tensor
    holes: torch.Tensor
    length: int
    packed: Int8Records | None = None
    keep: Any = None

    @property
    def host_blocks(self) -> HostBlocks:
        """The rows as kernels take them."""
        return HostBlocks(
            tag_of(self.slabs[0].dtype), self.block_ptr, self.table.numpy(), self.holes.numpy(), self.valid.numpy(),
            self.clean.shape[3], self.packed,
        )  # fmt: skip


def given_masses(
    masses: torch.Tensor, kv_heads: int, table: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Vectors, torch.Tensor]:
    """A digest that scores block n of row b by masses[b, head, n], to the last bit of its dtype, and its table.

    Each query head picks out its own channel of the vectors; -inf is for all heads of a row or for none.
    """
    batch, heads, blocks = masses.shape
    group, dead = heads // kv_heads, (masses == -math.inf).all(1)
    table = torch.arange(batch * blocks).view(batch, blocks).int() if table is None else table
    physical = table[:, :blocks].long()
    digests, bias = torch.zeros(table.numel() + 2, kv_heads, 16), torch.zeros(table.numel() + 2)
    digests[physical, :, :group] = masses.view(batch, kv_heads, group, blocks).permute(0, 3, 1, 2)
    digests[physical[dead]], bias[physical[dead]] = math.nan, -math.inf
    query = torch.eye(group, 16).repeat(batch, kv_heads, 1)
    return vectors(query.numpy(), bits(digests.to(dtype)), bias.numpy(), dtype=dtype), table


def random_submeans(
    rows: int, physical: int, count: int, dim: int, outliers: float = 0.0
) -> tuple[SubMeans, tuple[torch.Tensor, ...]]:
    """Sub-means of two KV heads, `count` pairs a block, and the tensors for `reference.score_submeans`.

    Some pairs have no token and NaN as scale. Such a share of the others are outliers.
    """
    codes = torch.randint(-7, 8, (physical, 2, count, dim), dtype=torch.int8)
    levels = torch.randint(0, 4, codes.shape, dtype=torch.int8)
    scales, sizes = ((torch.rand(physical, 2, count) * 0.3).bfloat16().float() for _ in range(2))
    bias = torch.randint(0, 3, (physical, count)).float().log()
    center, sigma = torch.randn(rows, 2, dim), torch.rand(rows, 2, dim) + 0.5
    marked = (torch.rand(sizes.shape) < outliers) & (bias[:, None] >= 0)
    poisoned = scales.masked_fill((bias[:, None] == -math.inf).expand(scales.shape), math.nan)
    packed = pack_halves(poisoned, torch.where(marked, -sizes, sizes))
    arrays = (pack_codes(codes), pack_levels(levels), packed, bias, center, sigma)
    return submeans(*(x.numpy() for x in arrays)), (codes, levels, scales, sizes, bias, center, sigma)


def make_case(
    batch: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    padding: tuple[int, ...],
    scattered: float = 0.0,
) -> Case:
    """Build a pool in two slabs; row b has `padding[b]` invalid tokens at its left and a share of others anywhere."""
    logical = math.ceil(length / block_size)
    physical = batch * logical + 2
    table = torch.randperm(physical)[: batch * logical].view(batch, logical).int()
    valid = torch.zeros(batch, logical * block_size, dtype=torch.uint8)
    for b in range(batch):
        valid[b, padding[b] : length] = 1
    valid[torch.rand(valid.shape) < scattered] = 0
    filled = torch.arange(logical * block_size) < length
    holes = ((valid == 0) & filled).view(batch, logical, block_size).any(-1).to(torch.uint8)
    content = torch.randn(physical, kv_heads, 2, block_size, dim).to(dtype)
    used = torch.zeros(physical, block_size, dtype=torch.bool)
    used[table.long()] = valid.view(batch, logical, block_size).bool()
    keep = used[:, None, None, :, None]
    poisoned = torch.where(keep, content, torch.tensor(math.nan, dtype=dtype))
    half = physical // 2
    slabs = [poisoned[:half].clone(), poisoned[half:].clone()]
    record = slabs[0][0].nbytes
    block_ptr = np.array([slab.data_ptr() + i * record for slab in slabs for i in range(len(slab))], np.int64)
    valid[:, length:] = 1  # beyond the length nothing may depend on it
    return Case(slabs, torch.where(keep, content, torch.zeros((), dtype=dtype)), block_ptr, table, valid, holes, length)


def packed_pool(
    kv_heads: int, dim: int, block_size: int, blocks: int, dtype: torch.dtype, large: float = 10.0
) -> tuple[HostPool, torch.Tensor]:
    """A pool whose odd blocks are packed, and what it holds, float64 [blocks, Hkv, 2, block_size, D].

    The channels have different sizes, up to `large`, and half of them are shifted by as much.
    """
    pool = HostPool(kv_heads, block_size, dim, dtype, packed_bytes=packed_bytes(dim, block_size))
    ids = pool.allocate(blocks)
    content = (torch.randn(blocks, *pool.block_shape) + torch.arange(dim) % 2) * torch.linspace(0.1, large, dim)
    slab = pool.slabs[0][:blocks]
    slab.copy_(content)
    held = slab.double()
    pack_blocks(pool, ids[1::2])
    held[1::2, :, 0], held[1::2, :, 1] = reference.pack_block(held[1::2, :, 0], held[1::2, :, 1])
    slab[1::2] = float("nan")  # nobody reads these places any more
    return pool, held


def pack_blocks(pool: HostPool, ids: np.ndarray[Any, Any]) -> None:
    """Pack blocks of a pool."""
    heads, half = np.arange(pool.block_shape[0]), pool.record_bytes // 2
    _, _, size, dim = pool.block_shape

    def pack(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> None:
        keys, records = (
            (place[:, None] + step * heads).ravel()
            for place, step in ((old, pool.record_bytes), (new, pool.packed_record_bytes))
        )
        step = half // size
        pack_records(keys, keys + half, step, step, records, kv_dtype=pool.dtype, dim=dim, block_size=size).run()

    pool.repack(ids, pack)


def packed_case(batch: int, kv_heads: int, dim: int, block_size: int, length: int, dtype: torch.dtype) -> Case:
    """Rows with half of their blocks packed; tokens that are not valid are NaN in the others."""
    logical = math.ceil(length / block_size)
    pool, held = packed_pool(kv_heads, dim, block_size, batch * logical, dtype, large=2.0)
    table = torch.randperm(batch * logical).view(batch, logical).int()
    valid = (torch.rand(batch, logical * block_size) < 0.95).to(torch.uint8)
    holes = (valid.view(batch, logical, block_size) == 0).any(-1).to(torch.uint8)
    seen = (valid.bool() & (torch.arange(logical * block_size) < length)).view(-1, block_size)
    for block, here in zip(table.flatten().tolist(), seen, strict=True):
        if block % 2 == 0:
            pool.slabs[0][block, :, :, ~here] = math.nan
    packed = Int8Records(packed_bytes(dim, block_size))
    return Case(pool.slabs, held, pool.block_ptr, table, valid, holes, length, packed, keep=pool)


def attend(
    query: torch.Tensor,
    blocks: HostBlocks,
    items: torch.Tensor,
    counts: torch.Tensor,
    length: int,
    *,
    scale: float,
    softcap: float | None = None,
    means: bool = True,
    scores: bool = False,
    pairs: Pairs | None = None,
    threads: int = 1,
) -> tuple[torch.Tensor, ...]:
    """out, lse, kbar and scores of `decode_attention` to listed items; 7 where nothing was written."""
    out, lse, kbar = torch.full_like(query, 7), torch.full(query.shape[:2], 7.0), torch.full_like(query, 7)
    raw = torch.full((*query.shape[:2], items.shape[2] * blocks.block_size), 7.0)
    launch = decode_attention(
        query.numpy(), blocks, items.numpy(), counts.numpy(), length, out.numpy(), lse.numpy(),
        kbar.numpy() if means else None, scale=scale, softcap=softcap, scores=raw.numpy() if scores else None,
        pairs=pairs,
    )  # fmt: skip
    assert launch.tasks % counts.numel() == 0
    assert launch.cost > 0
    run(launch, threads)
    return out, lse, kbar, raw
