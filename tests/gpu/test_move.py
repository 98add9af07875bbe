"""KV on its way between host records and slots."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_offload.cpu.packed import pack_records, packed_bytes
from hf_offload.cpu.reference import pack_block
from hf_offload.gpu.move import PackedLayout, fetch, store_block, write_token

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
            self.layout = PackedLayout(nbytes, 2 * size * dim, 2 * (size + 1) * dim)
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


@pytest.mark.parametrize(("how", "dtype"), KINDS)
@pytest.mark.parametrize(("batch", "heads", "size", "dim"), SIZES)
@pytest.mark.parametrize("packed", [False, True])
def test_fetch(batch: int, heads: int, size: int, dim: int, dtype: torch.dtype, device: str, packed: bool) -> None:
    torch.manual_seed(dim)
    blocks, slots, width = 6, 7, 5
    content = (torch.randn(batch * blocks, heads, 2, size, dim) * torch.linspace(0.1, 10, dim)).to(dtype)
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
    pool = torch.zeros(1, 1, 1, 2, 8, 16, dtype=dtype)
    one = torch.zeros(1, 1, 1, dtype=torch.int32)
    fetch(pool, one, one + 1, one[0] + 1, records.block_ptr, torch.arange(2).int()[None], packed=records.layout)
    assert torch.equal(pool[0, 0, 0].double(), records.holds[1, 0].to(dtype).double())
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


def test_host_memory_is_read_and_written_16_bytes_at_a_time() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("ptx.py")
    done = subprocess.run(
        [sys.executable, script, "cases_move", "fetch bf16 D80 block 16 int8", "store_block bf16 D80 block 16"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fetching, storing = done.stdout.split("\f")
    assert "ld.global.v4.b32" in fetching
    assert "ld.global.b8" not in fetching
    assert "st.global.v4.b32" in storing


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
    with pytest.raises(TypeError, match=r"counts has dtype torch\.int64"):
        fetch(pool, some, some, some[:, :, 0].long(), ptr, table, packed=None)
    with pytest.raises(ValueError, match=r"blocks has shape \(1, 2, 3\)"):
        fetch(pool, some, some[:, :, :3].contiguous(), some[:, :, 0].contiguous(), ptr, table, packed=None)
    with pytest.raises(ValueError, match="not aligned"):
        fetch(pool, some, some, some[:, :, 0].contiguous(), ptr, table, packed=PackedLayout(1000, 256, 288))
