"""Moves of KV between host records and slots."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from references.cpu import pack_block

from hf_offload.cpu.kernels.int8_blocks import pack_records, packed_bytes
from hf_offload.gpu.kv_copy import PackedLayout, fetch, store_block, store_tokens, write_token

GARBAGE = 10**8
KINDS = [
    ("torch", torch.float32),
    ("torch", torch.float16),
    ("torch", torch.bfloat16),
    ("interpreted", torch.float32),
    ("interpreted", torch.float16),
    *(pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in (torch.float32, torch.float16, torch.bfloat16)),
]
SIZES = [(2, 3, 32, 64), (1, 1, 8, 80), (3, 2, 16, 96), (1, 2, 128, 16), (2, 1, 8, 256)]


@pytest.fixture
def device(request: pytest.FixtureRequest, how: str) -> str:
    """Where the tensors lie; with "interpreted", kernels run on CPU tensors."""
    if how == "interpreted":
        request.getfixturevalue("interpreted")
    return "cuda" if how == "cuda" else "cpu"


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


class Records:
    """Host blocks [P, Hkv, 2, block_size, D] of which the odd ones may be packed, and what each of them holds."""

    def __init__(self, content: torch.Tensor, device: str, *, packed: bool = False) -> None:
        pinned = device == "cuda"
        blocks, heads, _, size, dim = content.shape
        self.plain = torch.empty(content.shape, dtype=content.dtype, pin_memory=pinned).copy_(content)
        self.holds = content.double()
        nbytes = packed_bytes(dim, size)
        # Two rows more than needed: a record begins at a multiple of 64 bytes.
        self.small = torch.zeros(blocks * heads + 2, nbytes, dtype=torch.uint8, pin_memory=pinned)
        first = -(-self.small.data_ptr() // 64) * 64
        addresses = [self.plain[i].data_ptr() for i in range(blocks)]
        self.layout = None
        if packed:
            self.layout = PackedLayout(nbytes, 2 * size * dim, 2 * (size + 2) * dim)
            where = first + nbytes * np.arange(blocks * heads, dtype=np.int64)
            keys = np.array([record.data_ptr() for record in self.plain.flatten(0, 1)], np.int64)
            step, part = dim * content.itemsize, size * dim * content.itemsize
            pack_records(keys, keys + part, step, step, where, kv_dtype=content.dtype, dim=dim, block_size=size).run()
            k, v = pack_block(self.holds[1::2, :, 0], self.holds[1::2, :, 1])
            top = torch.finfo(content.dtype).max
            self.holds[1::2] = torch.stack((k, v), 2).clamp(-top, top)
            self.plain[1::2] = math.nan
            addresses[1::2] = [int(where[i * heads]) + 1 for i in range(1, blocks, 2)]
        self.block_ptr = torch.tensor(addresses, device=device)


def moves_of(batch: int, heads: int, slots: int, blocks: int, width: int) -> tuple[torch.Tensor, ...]:
    """Ragged lists of moves: slots, blocks and counts, with garbage behind the counts."""
    into, chosen = (torch.full((batch, heads, width), GARBAGE, dtype=torch.int32) for _ in range(2))
    counts = torch.randint(0, width + 1, (batch, heads), dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, width
    for b in range(batch):
        for h in range(heads):
            count = int(counts[b, h])
            into[b, h, :count] = torch.randperm(slots)[:count]
            chosen[b, h, :count] = torch.randperm(blocks)[:count]
    return into, chosen, counts


def tables(batch: int, blocks: int) -> torch.Tensor:
    return torch.randperm(batch * blocks).view(batch, blocks).int()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("how", "dtype"), KINDS)
@pytest.mark.parametrize(("batch", "heads", "size", "dim"), SIZES)
@pytest.mark.parametrize("packed", [False, True])
def test_fetch(batch: int, heads: int, size: int, dim: int, dtype: torch.dtype, device: str, packed: bool) -> None:
    torch.manual_seed(dim)
    blocks, slots, width = 6, 7, 5
    content = (torch.randn(batch * blocks, heads, 2, size, dim) * torch.linspace(0.1, 10, dim) + 3).to(dtype)
    records = Records(content, device, packed=packed)
    table = tables(batch, blocks)
    into, chosen, counts = moves_of(batch, heads, slots, blocks, width)
    pool = torch.full((batch, heads, slots, 2, size, dim), math.nan, dtype=dtype)
    want = pool.clone()
    for b in range(batch):
        for h in range(heads):
            for m in range(int(counts[b, h])):
                want[b, h, into[b, h, m]] = records.holds[table[b, chosen[b, h, m]], h].to(dtype)
    pool = pool.to(device)
    lists = (x.to(device) for x in (into, chosen, counts))
    fetch(pool, *lists, records.block_ptr, table.to(device), packed=records.layout)
    torch.testing.assert_close(pool.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("how", "dtype"), [kind for kind in KINDS if isinstance(kind, tuple)])
def test_what_rounding_carries_beyond_the_range_stays_finite(dtype: torch.dtype, device: str) -> None:
    top = min(torch.finfo(dtype).max, 2.9e38)
    content = torch.full((2, 1, 2, 8, 16), top, dtype=dtype)
    content[:, :, :, 1::2] *= -1
    records = Records(content, device, packed=True)
    pool = torch.zeros(1, 1, 1, 2, 8, 16, dtype=dtype, device=device)
    one = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    table = torch.arange(2, dtype=torch.int32, device=device)[None]
    fetch(pool, one, one + 1, one[0] + 1, records.block_ptr, table, packed=records.layout)
    assert torch.equal(pool[0, 0, 0].cpu().double(), records.holds[1, 0].to(dtype).double())
    assert pool.isfinite().all()


@pytest.mark.parametrize(("how", "dtype"), KINDS)
@pytest.mark.parametrize(("batch", "heads", "size", "dim"), SIZES)
def test_write_token(batch: int, heads: int, size: int, dim: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(size)
    blocks, slots = 3, 4
    pool = torch.full((batch, heads, slots, 2, size, dim), math.nan, dtype=dtype)
    slot_of = torch.full((batch, heads, blocks), GARBAGE, dtype=torch.int32)
    for position in (0, size - 1, size, 2 * size + size // 2):
        block, offset = divmod(position, size)
        slot_of[:, :, block] = torch.randint(0, slots, (batch, heads))
        slot_of[-1, -1, block] = -1  # not resident
        # Heads and rows lie as a fused projection [B, 1, 2, Hkv, D] leaves them.
        both = torch.randn(batch, 1, 2, heads, dim).to(dtype)
        want = pool.clone()
        for b in range(batch):
            for h in range(heads):
                if slot_of[b, h, block] >= 0:
                    want[b, h, slot_of[b, h, block], :, offset] = both[b, 0, :, h]
        there = both.to(device)
        moved = pool.to(device)
        limits = torch.tensor([position + 1, 0], dtype=torch.int32, device=device)
        write_token(moved, slot_of.to(device), there[:, 0, 0], there[:, 0, 1], limits)
        assert torch.equal(as_bits(moved), as_bits(want))
        pool = moved.cpu()


@pytest.mark.parametrize(("how", "dtype"), KINDS)
def test_a_token_that_no_block_is_there_for_is_not_written(dtype: torch.dtype, device: str) -> None:
    pool = torch.zeros(1, 1, 2, 2, 8, 16, dtype=dtype, device=device)
    slot_of = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)
    token = torch.ones(1, 1, 16, dtype=dtype, device=device)
    for length in (0, 17):
        write_token(pool, slot_of, token, token, torch.tensor([length, 0], dtype=torch.int32, device=device))
    assert not pool.any()


@pytest.mark.parametrize(("how", "dtype"), KINDS)
@pytest.mark.parametrize(("batch", "heads", "size", "dim"), SIZES)
def test_store_block(batch: int, heads: int, size: int, dim: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(dim)
    blocks, slots, block = 5, 4, 3
    records = Records(torch.full((batch * blocks, heads, 2, size, dim), math.nan, dtype=dtype), device)
    table = tables(batch, blocks)
    pool = torch.randn(batch, heads, slots, 2, size, dim).to(dtype)
    slot_of = torch.full((batch, heads, blocks), GARBAGE, dtype=torch.int32)
    slot_of[:, :, block] = torch.randint(0, slots, (batch, heads))
    slot_of[0, 0, block] = -1
    want = records.plain.clone()
    for b in range(batch):
        for h in range(heads):
            if slot_of[b, h, block] >= 0:
                want[table[b, block], h] = pool[b, h, slot_of[b, h, block]]
    store_block(pool.to(device), slot_of.to(device), block, records.block_ptr, table.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(as_bits(records.plain), as_bits(want))


def laid_out(how: str, batch: int, heads: int, count: int, dim: int, **kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[B, Hkv, T, D]` as models leave them: contiguous, turned around, or pieces of a fused projection."""
    if how == "contiguous":
        k, v = torch.randn(2, batch, heads, count, dim).to(**kind)
    elif how == "turned":
        k, v = torch.randn(2, batch, count, heads, dim).to(**kind).transpose(2, 3)
    else:  # values begin where 16 bytes do not, and tokens do not lie at multiples of them
        both = torch.randn(batch, count, 2 * heads * dim + 3).to(**kind)
        k = both[..., : heads * dim].unflatten(-1, (heads, dim)).transpose(1, 2)
        v = both[..., heads * dim + 1 : -2].unflatten(-1, (heads, dim)).transpose(1, 2)
    return k, v


@pytest.mark.parametrize(("how", "dtype"), KINDS)
@pytest.mark.parametrize(
    ("batch", "heads", "size", "dim", "layout", "first", "count"),
    [
        (2, 3, 32, 64, "turned", 0, 97),
        (2, 3, 32, 64, "contiguous", 5, 7),  # within one block
        (3, 2, 16, 96, "fused", 31, 34),
        (1, 1, 8, 80, "contiguous", 13, 27),
        (1, 2, 128, 16, "turned", 127, 2),
        (2, 1, 8, 256, "fused", 8, 16),
        (1, 2, 64, 128, "turned", 70, 155),
    ],
)
def test_store_tokens(
    batch: int, heads: int, size: int, dim: int, layout: str, first: int, count: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(dim)
    blocks = -(-(first + count) // size) + 1
    records = Records(torch.full((batch * blocks, heads, 2, size, dim), math.nan, dtype=dtype), device)
    table = tables(batch, blocks)
    k, v = laid_out(layout, batch, heads, count, dim, device=device, dtype=dtype)
    want = records.plain.clone()
    for b in range(batch):
        for t in range(first, first + count):
            want[table[b, t // size], :, 0, t % size] = k[b, :, t - first].cpu()
            want[table[b, t // size], :, 1, t % size] = v[b, :, t - first].cpu()
    store_tokens(k, v, records.block_ptr, table.to(device), first, size)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(as_bits(records.plain), as_bits(want))


@pytest.mark.parametrize(("how", "dtype"), KINDS)
def test_no_new_token_writes_nothing(dtype: torch.dtype, device: str) -> None:
    none = torch.zeros(1, 2, 0, 16, dtype=dtype, device=device)
    nowhere = torch.full((3,), GARBAGE, dtype=torch.int64, device=device)
    store_tokens(none, none, nowhere, torch.zeros(1, 3, dtype=torch.int32, device=device), 9, 8)


def test_wrong_arguments_are_named() -> None:
    pool = torch.zeros(1, 2, 3, 2, 8, 16)
    some = torch.zeros(1, 2, 4, dtype=torch.int32)
    table, ptr, limits = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), some[0, 0, :2]
    token = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="block_size 12"):
        store_block(torch.zeros(1, 2, 3, 2, 12, 16), some, 0, ptr, table)
    with pytest.raises(ValueError, match="head dimension 20"):
        store_block(torch.zeros(1, 2, 3, 2, 8, 20), some, 0, ptr, table)
    with pytest.raises(ValueError, match="block 4 is beyond"):
        store_block(pool, some, 4, ptr, table)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float16"):
        write_token(pool, some, token.half(), token, limits)
    with pytest.raises(ValueError, match=r"v has shape \(1, 2, 8\)"):
        write_token(pool, some, token, token[..., :8], limits)
    many = torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match=r"tokens 24\.\.33 exceed the table's 32"):
        store_tokens(many, many, ptr, table, 24, 8)
    with pytest.raises(TypeError, match=r"v has dtype torch\.float16"):
        store_tokens(many, many.half(), ptr, table, 0, 8)
    with pytest.raises(ValueError, match=r"v has shape \(1, 2, 8, 16\)"):
        store_tokens(many, many[:, :, 1:], ptr, table, 0, 8)
    with pytest.raises(ValueError, match=r"k has shape \(1, 2, 16, 9\), strides \(288, 144, 1, 16\)"):
        store_tokens(many.transpose(2, 3), many, ptr, table, 0, 8)
    with pytest.raises(TypeError, match=r"counts has dtype torch\.int64"):
        fetch(pool, some, some, some[:, :, 0].long(), ptr, table, packed=None)
    with pytest.raises(ValueError, match=r"blocks has shape \(1, 2, 3\)"):
        fetch(pool, some, some[:, :, :3].contiguous(), some[:, :, 0].contiguous(), ptr, table, packed=None)
    with pytest.raises(ValueError, match="not aligned"):
        fetch(pool, some, some, some[:, :, 0].contiguous(), ptr, table, packed=PackedLayout(1000, 256, 288))
