"""Calls of the GPU operations with checks of what they give, against loops, float64 or their torch form.

A torch form is a reference where `test_exactness.py` compares it with attention. Rows are ragged, a row or head has
nothing, and what may not be read is NaN or an index far outside.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pools import random_submeans
from references import cpu as reference
from torch import Tensor
from torch.testing import assert_close
from unpacking import unpack_codes, unpack_halves, unpack_levels

from hf_offload.cpu.kernels.int8_blocks import pack_records, packed_bytes
from hf_offload.gpu import block_topk, digest_scores, exchange, kv_copy, seal
from hf_offload.gpu.backend import ON_TRITON
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.gpu.paged_attention import count_splits, paged_attention
from hf_offload.policies.hgca.kernels.resident_weights import update_weights
from hf_offload.scores import Scores

FAR = 10**8


@dataclass
class Case:
    """A call of an operation with tensors on the CPU, and the check of its result and of its arguments after it."""

    operation: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[..., None]
    "(result, **arguments)."
    keeps: Any = None
    "What the arguments hold addresses of."
    like_torch: bool = False
    "The check compares with the operation's torch form."

    def run(self, device: str) -> None:
        """Call the operation on a device, and check."""
        given = copied(self.arguments, device)
        result = self.operation(**given)
        if device == "cuda":
            torch.cuda.synchronize()
        self.check(result, **given)


def copied(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: on_device(value, device) for name, value in arguments.items()}


def on_device(value: Any, device: str) -> Any:
    """A copy on a device with the strides that the tensor has."""
    if isinstance(value, HostResult):  # a corrected one stays on the host, as a step has it
        parts = (value.out, value.lse, value.kbar, value.predicted)
        if value.kbar is None or device == "cpu":
            return HostResult(*(on_device(part, device) for part in parts))
        return HostResult(*(part.pin_memory() for part in parts))
    if not isinstance(value, Tensor):
        return value
    flat = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    return flat.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def close(got: Tensor, want: Tensor, rtol: float, atol: float) -> None:
    """Compare with float64; −inf and NaN in the same places."""
    assert_close(got.double().cpu(), want.double().cpu(), rtol=rtol, atol=atol, equal_nan=True)


def same_bits(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.cpu().contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@contextmanager
def in_torch() -> Iterator[None]:
    """Compute operations of CPU tensors in torch, although a fixture lets Triton's interpreter do that."""
    interpreted = "cpu" in ON_TRITON
    ON_TRITON.discard("cpu")
    try:
        yield
    finally:
        if interpreted:
            ON_TRITON.add("cpu")


def like_torch(
    operation: Callable[..., Any], arguments: dict[str, Any], meant: Callable[..., Any], tolerance: float = 0.0
) -> Case:
    """A case whose reference is the operation's torch form; `meant(result, **arguments)`: tensors that count."""

    def check(result: Any, **given: Any) -> None:
        there, again = copied(given, "cpu"), copied(arguments, "cpu")
        with in_torch():
            want = meant(operation(**again), **again)
            got = meant(result, **there)
        for one, other in zip(got, want, strict=True):
            close(one, other, tolerance, tolerance)

    return Case(operation, arguments, check, like_torch=True)


def lists(entries: Tensor, counts: Tensor) -> list[list[list[int]]]:
    """The meant entries of every row and head."""
    assert entries.dtype == counts.dtype == torch.int32
    found, count = entries.tolist(), counts.tolist()
    return [[found[b][h][: count[b][h]] for h in range(len(count[b]))] for b in range(len(count))]


# -- choice and split of blocks ----------------------------------------------------------------------------------------


def select_blocks(
    score: Tensor, sealed: int, length: int, low: list[int], high: list[int], recent: int, k: int,
    spare: int = 0, capacity: int | None = None,
) -> Case:  # fmt: skip
    """Blocks of 8 tokens; what does not fit into the capacity is lost."""
    ends = {"low": numbers(*low), "high": numbers(*high)}
    want = reference.select_blocks(score, sealed, -(-length // 8), ends["low"], ends["high"], recent, k)
    most = max([1, min(k, score.shape[2]), *(len(line) for row in want for line in row)])
    capacity = capacity or most + spare

    def check(result: Any, **given: Any) -> None:
        assert result[0].shape == (*score.shape[:2], capacity)
        assert lists(*result) == [[line[:capacity] for line in row] for row in want]

    arguments = {"score": score, "limits": numbers(length, sealed), **ends, "block_size": 8, "recent": recent, "k": k}
    return Case(block_topk.select_blocks, {**arguments, "capacity": capacity}, check)


def select_drawn(seed: int) -> Case:
    draw = np.random.default_rng(seed)
    num_blocks = int(draw.integers(0, 150))
    sealed, length = max(0, num_blocks - int(draw.integers(0, 3))), max(0, num_blocks * 8 - int(draw.integers(0, 8)))
    score = torch.from_numpy(draw.standard_normal((3, 2, num_blocks + int(draw.integers(1, 5)))).astype(np.float32))
    if seed % 3 == 0:
        score = (score * 2).round()  # many ties, and both zeros
    if seed % 4 == 0:
        score[0, :, ::2], score[1, :, ::3] = -math.inf, math.nan
    score[:, :, sealed:] = math.nan if seed % 2 else math.inf
    low = draw.integers(0, num_blocks + 3, 3).tolist() if seed % 2 else [0, 0, num_blocks // 2]
    high = [x + int(draw.integers(0, 4)) for x in low]
    recent, k, spare = (int(draw.integers(0, end)) for end in (5, num_blocks + 3, 3))
    return select_blocks(score, sealed, length, low, high, recent, k, spare=spare)


def split_blocks(sizes: tuple[int, int]) -> Case:
    capacity, blocks = sizes
    draw = np.random.default_rng(capacity)
    counts = draw.integers(0, capacity + 1, (3, 2))
    counts[0] = capacity, 0
    chosen = np.resize([-1, 10**9], (3, 2, capacity))
    slot_of = np.where(draw.random((3, 2, blocks)) < 0.5, -1, draw.integers(0, 500, (3, 2, blocks)))
    slot_of[1, 0], slot_of[1, 1] = -1, 7
    for line in np.ndindex(3, 2):
        chosen[line][: counts[line]] = np.sort(draw.permutation(blocks)[: counts[line]])

    def meant(split: Any, **given: Any) -> list[Tensor]:
        near, far = (torch.arange(capacity) >= n.cpu()[..., None] for n in (split.near_counts, split.far_counts))
        entries = (split.near, near), (split.near_slots, near), (split.far, far)
        listed = [some.cpu().masked_fill(unused, 0) for some, unused in entries]
        return [*listed, split.near_counts, split.far_counts]

    given = {"blocks": chosen, "counts": counts, "slot_of": slot_of}
    arguments = {name: torch.from_numpy(x).int() for name, x in given.items()}
    return like_torch(block_topk.split_blocks, arguments, meant)


# -- scores of blocks --------------------------------------------------------------------------------------------------


def tables(batch: int, physical: int, blocks: int, sealed: int) -> tuple[Tensor, Tensor]:
    """A table of `blocks` entries, garbage from `sealed` on, and the limits."""
    table = torch.stack([torch.randperm(physical)[:blocks] for _ in range(batch)]).int()
    table[:, sealed:] = torch.tensor([-1, 10**9])[torch.arange(blocks - sealed) % 2]
    return table, numbers(sealed * 8 + 3, sealed)


def poison(table: Tensor, sealed: int, *digests: Tensor) -> None:
    """Fill with NaN what belongs to no sealed block."""
    unused = torch.ones(len(digests[0]), dtype=torch.bool)
    unused[table[:, :sealed].flatten().long()] = False
    for digest in digests:
        digest[unused] = math.nan


def score_vectors(sizes: tuple[int, int, int, int], softcap: float | None) -> Case:
    group, width, blocks, sealed = sizes
    torch.manual_seed(group)
    ready, vectors, bias = torch.randn(2, 2 * group, width), torch.randn(2 * blocks, 2, width), torch.randn(2 * blocks)
    table, limits = tables(2, 2 * blocks, blocks, sealed)
    poison(table, sealed, vectors, bias)
    if sealed > 1:  # a block without tokens
        dead = int(table[0, 1])
        bias[dead], vectors[dead] = -math.inf, math.nan
    given = {"ready": ready, "vectors": vectors, "bias": bias, "table": table, "limits": limits, "softcap": softcap}
    return like_torch(digest_scores.score_vectors, given, lambda masses, **given: [masses], 1e-5 * width**0.5)


def score_submeans(shape: tuple[int, int, int, int, int], softcap: float | None) -> Case:
    pairs, dim, group, blocks, sealed = shape
    torch.manual_seed(pairs + dim)
    table, limits = tables(2, 2 * blocks, blocks, sealed)
    packed, _ = random_submeans(2, 2 * blocks, pairs, dim)
    names = ("codes", "levels", "sizes", "bias", "center", "sigma")
    digest = {name: torch.from_numpy(getattr(packed, name)) for name in names}
    if sealed:
        digest["bias"][table[1, 0].long()] = -math.inf  # some pairs of other blocks have no token, either
    poison(table, sealed, digest["sizes"].view(torch.bfloat16), digest["bias"])
    query = torch.randn(2, 2 * group, dim) * 2
    query[0, 0] = 0.0
    query[1, -1] *= 1e-6
    given = {"query": query, **digest, "table": table, "limits": limits, "scale": dim**-0.5, "softcap": softcap}
    return like_torch(digest_scores.score_submeans, given, lambda masses, **given: [masses], 3e-5)


def join_heads(sizes: tuple[int, int, int], join: str, has_tail: bool) -> Case:
    group, blocks, sealed = sizes
    torch.manual_seed(group)
    masses, tail = torch.randn(2, 3 * group, blocks) * 8, torch.randn(2, 3 * group)
    masses[:, :, ::3] = -math.inf  # blocks without tokens
    masses[0, :group, sealed // 2 :] += 80  # exponentials that overflow without the peak
    masses[1, 2 * group, 1::3] = -math.inf  # which one head of a group does not take from the others
    tail[0, group] = 60  # a head whose blocks vanish beside its tail
    tail[1, 0] = -math.inf
    masses[1, group : 2 * group], tail[1, group : 2 * group] = -math.inf, -math.inf  # a group without tokens
    masses[0, 2 * group : 3 * group - 1], tail[0, 2 * group : 3 * group - 1] = -math.inf, -math.inf  # all but one
    masses[:, :, sealed:] = math.nan
    if not has_tail:
        tail.fill_(-math.inf)
    want = torch.full((2, 3, blocks), -math.inf, dtype=torch.float64)
    want[:, :, :sealed] = reference.join_scores(masses[:, :, :sealed], tail, 3, join=join)
    given = {"masses": masses, "tail": tail, "limits": numbers(sealed * 8 + 1, sealed), "kv_heads": 3, "join": join}
    exact = 1e-5 if join == "raw" else 1e-30
    return Case(digest_scores.join_heads, given, lambda scores, **given: close(scores, want, 5e-5, exact))


# -- the exchange of resident blocks -----------------------------------------------------------------------------------


def resident_set(
    seed: int, slots: int, blocks: int, *, sealed: int, scored: int | None = None, low: Sequence[int] = (0,),
    high: Sequence[int] = (1,), free: float = 0.0, ties: bool = False, worth: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A random resident set of 2 KV heads; what `worth` does not know is NaN, and padding is never wanted."""
    rng = np.random.default_rng(seed)
    scored = sealed if scored is None else scored
    shape = (len(high), 2)
    values = rng.standard_normal((*shape, blocks)).astype(np.float32)
    if ties:
        values = np.round(values)
    values[rng.random(values.shape) < 0.1] = -np.inf
    if worth is not None:
        values[:] = worth
    for row, first in enumerate(low):
        values[row, :, :first] = -np.inf
    values[:, :, scored:] = np.nan
    block_of, slot_of = np.full((*shape, slots), -1, np.int32), np.full((*shape, blocks), -1, np.int32)
    for line in np.ndindex(shape):
        held = rng.permutation(max(sealed, 1))[:slots]
        places = rng.permutation(slots)[: len(held)]
        keep = rng.random(len(held)) >= free
        block_of[line][places[keep]], slot_of[line][held[keep]] = held[keep], places[keep]
    arrays = {"worth": values, "block_of": block_of, "slot_of": slot_of}
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {**given, "scored": numbers(scored), "low": numbers(*low), "high": numbers(*high)}


def changes(before: dict[str, Any], now: dict[str, Any], sealed: int, recent: int) -> Iterator[tuple[Any, ...]]:
    """Of each row and KV head the worth of scored blocks, slots, which blocks have gone, come, may go and may come."""
    for b, h in np.ndindex(before["block_of"].shape[:2]):
        block_of, slot_of = now["block_of"][b, h].tolist(), now["slot_of"][b, h].tolist()
        had, has = set(before["block_of"][b, h].tolist()) - {-1}, set(block_of) - {-1}
        assert {block: slot for block, slot in enumerate(slot_of) if slot >= 0} == {x: block_of.index(x) for x in has}
        low, high = int(before["low"][b]), int(before["high"][b])
        may_come = set(range(high, min(sealed - recent, int(before["scored"]))))
        may_go = {block for block in had | has if block < low or high <= block < sealed - recent}
        worth = dict(enumerate(before["worth"][b, h, : int(before["scored"])].tolist()))
        yield worth, len(block_of), had - has, has - had, has, may_go, may_come


def exchange_blocks(at: dict[str, Any], *, sealed: int, recent: int, due: int | None = None, least: int = 0) -> Case:
    """The exchange of a set, in which so many blocks at least should move; none does unless it is due.

    Then no block is missing that is worth more than one that could have gone.
    """

    def meant(moves: Any, **now: Any) -> list[Tensor]:
        slots, blocks, counts = (part.cpu() for part in moves)
        assert counts.sum() >= least
        assert due != 0 or not counts.any()
        for worth, room, gone, come, has, may_go, may_come in changes(at, now, sealed, recent):
            assert gone <= may_go
            assert come <= may_come
            best = max((worth[block] for block in may_come - has), default=-math.inf)
            if best > -math.inf and due != 0:
                assert len(has) == room
                assert all(worth.get(block, -math.inf) >= best for block in has & may_go)
        unused = torch.arange(slots.shape[2]) >= counts[..., None]
        return [now["block_of"], now["slot_of"], counts, slots.masked_fill(unused, 0), blocks.masked_fill(unused, 0)]

    given = {**at, "limits": numbers(sealed * 8 + 3, sealed), "recent": recent}
    return like_torch(exchange.exchange, given | ({} if due is None else {"due": numbers(due)}), meant)


def exchange_drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    slots, blocks = int(rng.integers(1, 24)), int(rng.integers(3, 100))
    sealed = int(rng.integers(0, blocks + 1))
    scored = max(0, sealed - int(rng.integers(0, 4)))
    low = rng.integers(0, 20, 2).tolist()
    high = [first + int(rng.integers(0, 6)) for first in low]
    at = resident_set(
        seed, slots, blocks, sealed=sealed, scored=scored, low=low, high=high, free=0.3 * (seed % 3), ties=seed % 2 == 0
    )
    return exchange_blocks(at, sealed=sealed, recent=int(rng.integers(0, 5)))


def open_block(at: dict[str, Any], *, sealed: int, recent: int, length: int | None = None, opens: bool = True) -> Case:
    """The block behind the sealed ones gets a free slot or that of the block worth least, if the next token is its."""

    def meant(result: None, **now: Any) -> list[Tensor]:
        for worth, room, gone, come, has, may_go, _ in changes(at, now, sealed, recent):
            assert come == ({sealed} if opens else set())
            assert gone <= may_go
            assert len(gone) == (opens and len(has - come) + len(gone) == room)
            assert all(worth.get(a, math.inf) <= worth.get(b, math.inf) for a in gone for b in has & may_go)
        return [now["block_of"], now["slot_of"]]

    limits = numbers(sealed * 8 if length is None else length, sealed)
    return like_torch(exchange.open_block, {**at, "limits": limits, "block_size": 8, "recent": recent}, meant)


def open_drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    sealed, slots = int(rng.integers(5, 100)), int(rng.integers(8, 40))
    high, recent = rng.integers(0, 2, 2).tolist(), int(rng.integers(0, 4))
    scored = max(0, sealed - int(rng.integers(0, 3))) if seed % 4 else 0
    at = resident_set(
        seed, slots, sealed + 3, sealed=sealed, scored=scored, low=[max(end - 1, 0) for end in high], high=high,
        free=0.15 * (seed % 3), ties=seed % 2 == 0,
    )  # fmt: skip
    return open_block(at, sealed=sealed, recent=recent)


# -- moves of KV -------------------------------------------------------------------------------------------------------


class Records:
    """Host blocks [P, Hkv, 2, block_size, D] of which the odd ones may be packed, and what each of them holds."""

    def __init__(self, content: Tensor, *, packed: bool = False) -> None:
        pinned = torch.cuda.is_available()
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
            self.layout = kv_copy.PackedLayout(nbytes, 2 * size * dim, 2 * (size + 2) * dim)
            where = first + nbytes * np.arange(blocks * heads, dtype=np.int64)
            keys = np.array([record.data_ptr() for record in self.plain.flatten(0, 1)], np.int64)
            step, part = dim * content.itemsize, size * dim * content.itemsize
            pack_records(keys, keys + part, step, step, where, kv_dtype=content.dtype, dim=dim, block_size=size).run()
            k, v = reference.pack_block(self.holds[1::2, :, 0], self.holds[1::2, :, 1])
            top = torch.finfo(content.dtype).max
            self.holds[1::2] = torch.stack((k, v), 2).clamp(-top, top)
            self.plain[1::2] = math.nan
            addresses[1::2] = [int(where[i * heads]) + 1 for i in range(1, blocks, 2)]
        self.block_ptr = torch.tensor(addresses)


def block_table(batch: int, blocks: int) -> Tensor:
    return torch.randperm(batch * blocks).view(batch, blocks).int()


Shape = tuple[int, int, int, int]
"Rows, KV heads, block size, head dimension."


def fetch(dtype: torch.dtype, shape: Shape, packed: bool) -> Case:
    (batch, heads, size, dim), blocks, there, moves = shape, 6, 7, 5
    torch.manual_seed(dim)
    content = (torch.randn(batch * blocks, heads, 2, size, dim) * torch.linspace(0.1, 10, dim) + 3).to(dtype)
    if packed:  # what rounding carries beyond the range stays finite
        content[1::4] = min(torch.finfo(dtype).max, 2.9e38)
        content[1::4, :, :, 1::2] *= -1
    records, table = Records(content, packed=packed), block_table(batch, blocks)
    slots, chosen = (torch.full((batch, heads, moves), FAR, dtype=torch.int32) for _ in range(2))
    counts = torch.randint(0, moves + 1, (batch, heads), dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, moves
    pool = torch.full((batch, heads, there, 2, size, dim), math.nan, dtype=dtype)
    want = pool.clone()
    for b, h in np.ndindex(batch, heads):
        count = int(counts[b, h])
        slots[b, h, :count], chosen[b, h, :count] = torch.randperm(there)[:count], torch.randperm(blocks)[:count]
        want[b, h, slots[b, h, :count]] = records.holds[table[b, chosen[b, h, :count]], h].to(dtype)
    given = {"slots": slots, "blocks": chosen, "counts": counts, "block_ptr": records.block_ptr, "table": table}
    given = {"pool": pool, **given, "packed": records.layout}
    return Case(kv_copy.fetch, given, lambda result, pool, **given: close(pool, want, 0, 0), records)


def write_token(dtype: torch.dtype, shape: Shape, place: int) -> Case:
    """The first token, the last and the first of a block, one within a block, none, and one of a block too many."""
    (batch, heads, size, dim), blocks, there = shape, 3, 4
    torch.manual_seed(size)
    position = (0, size - 1, size, 2 * size + size // 2, -1, blocks * size)[place]
    pool = torch.full((batch, heads, there, 2, size, dim), math.nan, dtype=dtype)
    slot_of = torch.full((batch, heads, blocks), FAR, dtype=torch.int32)
    # Heads and rows lie as a fused projection [B, 1, 2, Hkv, D] leaves them.
    both, want = torch.randn(batch, 1, 2, heads, dim).to(dtype), pool.clone()
    block, offset = divmod(position, size)
    if 0 <= block < blocks:
        slot_of[:, :, block] = torch.randint(0, there, (batch, heads))
        slot_of[-1, -1, block] = -1  # not resident
        for b, h in list(np.ndindex(batch, heads))[:-1]:
            want[b, h, slot_of[b, h, block], :, offset] = both[b, 0, :, h]
    limits = numbers(position + 1, 0)
    given = {"pool": pool, "slot_of": slot_of, "k": both[:, 0, 0], "v": both[:, 0, 1], "limits": limits}
    return Case(kv_copy.write_token, given, lambda result, pool, **given: same_bits(pool, want))


def store_block(dtype: torch.dtype, shape: Shape) -> Case:
    (batch, heads, size, dim), blocks, there, block = shape, 5, 4, 3
    torch.manual_seed(dim)
    records = Records(torch.full((batch * blocks, heads, 2, size, dim), math.nan, dtype=dtype))
    table, pool = block_table(batch, blocks), torch.randn(batch, heads, there, 2, size, dim).to(dtype)
    slot_of = torch.full((batch, heads, blocks), FAR, dtype=torch.int32)
    slot_of[:, :, block] = torch.randint(0, there, (batch, heads))
    slot_of[0, 0, block] = -1
    want = records.plain.clone()
    for b, h in list(np.ndindex(batch, heads))[1:]:
        want[table[b, block], h] = pool[b, h, slot_of[b, h, block]]
    given = {"pool": pool, "slot_of": slot_of, "block": block, "block_ptr": records.block_ptr, "table": table}
    return Case(kv_copy.store_block, given, lambda result, **given: same_bits(records.plain, want), records)


def laid_out(how: str, dtype: torch.dtype, batch: int, heads: int, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """K and V `[B, Hkv, T, D]` as models leave them: contiguous, one or both turned, or parts of a projection."""
    if how == "contiguous":
        k, v = torch.randn(2, batch, heads, count, dim).to(dtype)
    elif how in ("turned", "mixed"):
        k, v = torch.randn(2, batch, count, heads, dim).to(dtype).transpose(2, 3)
        k = k.contiguous() if how == "mixed" else k
    else:  # values begin where 16 bytes do not, and tokens do not lie at multiples of them
        both = torch.randn(batch, count, 2 * heads * dim + 3).to(dtype)
        k = both[..., : heads * dim].unflatten(-1, (heads, dim)).transpose(1, 2)
        v = both[..., heads * dim + 1 : -2].unflatten(-1, (heads, dim)).transpose(1, 2)
    return k, v


def store_tokens(dtype: torch.dtype, tokens: tuple[Shape, str, int, int]) -> Case:
    (batch, heads, size, dim), layout, first, count = tokens
    torch.manual_seed(dim)
    blocks = -(-(first + count) // size) + 1
    records = Records(torch.full((batch * blocks, heads, 2, size, dim), math.nan, dtype=dtype))
    table, (k, v) = block_table(batch, blocks), laid_out(layout, dtype, batch, heads, count, dim)
    want = records.plain.clone()
    for b, t in itertools.product(range(batch), range(first, first + count)):
        want[table[b, t // size], :, 0, t % size] = k[b, :, t - first]
        want[table[b, t // size], :, 1, t % size] = v[b, :, t - first]
    given = {"k": k, "v": v, "block_ptr": records.block_ptr, "table": table, "first": first, "block_size": size}
    return Case(kv_copy.store_tokens, given, lambda result, **given: same_bits(records.plain, want), records)


# -- attention ---------------------------------------------------------------------------------------------------------


def listing(
    dtype: torch.dtype, heads: int, group: int, dim: int, size: int, width: int, padded: bool = False
) -> dict[str, Any]:
    """Arguments with two rows; in the first, one KV head lists nothing and the last one all there is room for."""
    torch.manual_seed(dim * size + group)
    batch, there, num_blocks = 2, width + 2, 2 * width
    length = num_blocks * size - size // 2 - 1
    valid = torch.rand(batch, num_blocks * size) > 0.2
    valid[0, : 2 * size + 3] = False  # two blocks of padding and a part of the next
    slots, blocks = (torch.tensor([-1, FAR, -FAR]).repeat(batch, heads, width)[:, :, :width].int() for _ in "ab")
    counts = torch.randint(1, width + 1, (batch, heads), dtype=torch.int32)
    counts[0, -1], counts[0, 0] = width, 0
    seen = torch.zeros(batch, heads, there, size, dtype=torch.bool)
    for b, h in np.ndindex(batch, heads):
        count = int(counts[b, h])
        slot, number = torch.randperm(there)[:count], torch.randperm(num_blocks - 1)[:count].sort().values
        number[-1:] = num_blocks - 1  # the newest block is only partly there
        slots[b, h, :count], blocks[b, h, :count] = slot.int(), number.int()
        at = number[:, None] * size + torch.arange(size)
        seen[b, h, slot] = (at < length) & (valid[b, at] | (not padded))
    pool = torch.randn(batch, heads, there, 2, size, dim).masked_fill(~seen[:, :, :, None, :, None], math.nan)
    return {
        "query": torch.randn(batch, heads * group, dim).to(dtype), "pool": pool.to(dtype), "slots": slots,
        "blocks": blocks, "counts": counts, "limits": numbers(length, 0), "valid": valid.byte() if padded else None,
    }  # fmt: skip


ATTENTION = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def attend(
    dtype: torch.dtype, shape: tuple[int, ...], padded: bool, softcap: float | None, query: str = "as the pool"
) -> Case:
    """Shares of attention to a listing, which add up; `shape` is (KV heads, group, dim, size, width)."""
    heads, _, _, size, width = shape
    given = listing(dtype, *shape, padded)
    if query == "fp32":
        given["query"] = given["query"].float()

    def meant(result: tuple[Tensor, Tensor], query: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        out, lse = (part.cpu() for part in result)
        assert out.shape[2] in (1, count_splits(2 * heads, width * size))
        assert (lse[0, 0] == -math.inf).all()  # the head that lists nothing
        assert not out[lse == -math.inf].any()
        return merge(out, lse, None, query, None, scale=0.3, dtype=torch.float32)

    return like_torch(paged_attention, {**given, "scale": 0.3, "softcap": softcap}, meant, ATTENTION[dtype])


MERGED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def merge_parts(dtype: torch.dtype, shape: tuple[int, int, int], kind: str, sinks: bool) -> Case:
    """Three rows: nothing of the device's in row 1's first head, nothing at all in its second; `shape`: (S, Hq, D)."""
    splits, heads, dim = shape
    torch.manual_seed(splits * dim)
    out, lse = torch.randn(3, heads, splits, dim), torch.randn(3, heads, splits) * 10
    lse[2, 0, splits // 2] = -math.inf
    lse[1, :2] = -math.inf
    out[lse == -math.inf] = 0.0
    host_out, kbar, predicted, query = torch.randn(4, 3, heads, dim)
    query = query.to(dtype)
    host_lse, sink = torch.randn(3, heads) * 10, torch.randn(heads) * 10
    host_lse[1, 1] = host_lse[2, 1] = -math.inf
    host_out[host_lse == -math.inf] = kbar[host_lse == -math.inf] = math.nan

    correction = (kbar, predicted) if kind == "corrected" else ()
    host = None if kind == "no host" else HostResult(host_out, host_lse, *correction)
    given = {"out": out, "lse": lse, "host": host, "query": query, "sinks": sink if sinks else None}
    return like_torch(merge, {**given, "scale": 0.3, "dtype": dtype}, lambda result, **given: result, MERGED[dtype])


def move_averages(dtype: torch.dtype, shape: tuple[int, ...], padded: bool, softcap: float | None, peak: bool) -> Case:
    """Averages of the weights of listed tokens move, or their peaks; those of other slots stay."""
    of = {**listing(dtype, *shape, padded), "scale": 0.3, "softcap": softcap}
    with in_torch():
        lse = paged_attention(**of)[1][:, :, 0]
    group, size, length = shape[1], shape[3], int(of["limits"][0])
    before = torch.rand(*lse.shape, *of["pool"].shape[2:5:2]) ** 8  # some below and some above the weights
    want = before.double()
    for b, hq in np.ndindex(lse.shape):
        h = hq // group
        for i in range(int(of["counts"][b, h])):
            slot, block = int(of["slots"][b, h, i]), int(of["blocks"][b, h, i])
            at, old = block * size + torch.arange(size), want[b, hq, slot]
            scores = Scores(0.3, softcap).of(of["pool"][b, h, slot, 0].double() @ of["query"][b, hq].double())
            weight, age = (scores - lse[b, hq]).exp(), (length - at).clamp(min=1)
            moved = old + (1 / age).clamp(min=0.25) * (weight - old)
            if peak:
                moved = torch.maximum(0.75 * old, 0.5 * weight * (age > 9))
            there = (at < length) & (of["valid"][b, at] != 0 if padded else True)
            want[b, hq, slot] = torch.where(there, moved, 0.0)
    given = {"average": before, **of, "lse": lse, "alpha": 0.25} | ({"share": 0.5, "after": 9} if peak else {})
    return Case(update_weights, given, lambda result, average, **given: close(average, want, 1e-5, 1e-5))


# -- digests -----------------------------------------------------------------------------------------------------------

PHYSICAL = 9


def blocks_of_keys(tokens: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers `[4]`, keys `[4, 2, T, D]` with a stride between tokens, and which of them count; the rest is NaN."""
    torch.manual_seed(tokens + dim)
    wide = torch.randn(4, tokens, 2, dim) * torch.rand(dim).exp() + torch.randn(dim)
    valid = torch.rand(4, tokens) > 0.3
    valid[0], valid[2] = True, False
    wide.masked_fill_(~valid[:, :, None, None], math.nan)
    return {"ids": torch.tensor([7, 0, 3, 5]), "k": wide.to(dtype).transpose(1, 2), "valid": valid}


def others_untouched(*kept: Tensor) -> None:
    """Blocks that were not named are as they were: all 1."""
    for tensor in kept:
        assert (tensor[[1, 2, 4, 6, 8]] == 1).all()


def seal_vectors(dtype: torch.dtype, sizes: tuple[int, int], bounds: bool) -> Case:
    tokens, dim = sizes
    given = blocks_of_keys(tokens, dim, dtype)
    count, out = given["valid"].sum(1).double(), ~given["valid"][:, None, :, None]
    k, some = given["k"].double(), count > 0
    if bounds:
        want = torch.cat([k.masked_fill(out, -math.inf).amax(2), k.masked_fill(out, math.inf).amin(2)], -1)
        want_bias = torch.where(some, 0.0, -math.inf)
    else:
        want, want_bias = k.masked_fill(out, 0.0).sum(2) / count[:, None, None], count.log()

    def check(result: None, vectors: Tensor, bias: Tensor, **told: Any) -> None:
        exact, ids = 0.0 if bounds else 1e-5, given["ids"]
        close(vectors.cpu()[ids][some], want[some], exact, exact)
        close(bias.cpu()[ids], want_bias, 0, 1e-6)
        others_untouched(vectors, bias)

    kept = {"vectors": torch.ones(PHYSICAL, 2, (1 + bounds) * dim), "bias": torch.ones(PHYSICAL)}
    return Case(seal.seal_vectors, {**given, **kept, "bounds": bounds}, check)


def seal_submeans(dtype: torch.dtype, sizes: tuple[int, int]) -> Case:
    tokens, dim = sizes
    given = blocks_of_keys(tokens, dim, dtype)
    k, pairs = given["k"], tokens // 2
    k[1, 0, 0], k[1, 0, 1] = 3.0, 3.0  # a pair of equal keys
    k[0, 1, 2, 0] = 300.0  # of an outlier
    center, sigma = torch.randn(4, 2, dim), torch.rand(4, 2, dim) + 0.5
    kept = {
        "codes": torch.ones(PHYSICAL, 2, pairs * dim // 2, dtype=torch.uint8),
        "levels": torch.ones(PHYSICAL, 2, dim // 16, pairs).int(), "sizes": torch.ones(PHYSICAL, 2, pairs).int(),
        "bias": torch.ones(PHYSICAL, pairs), "center": center, "sigma": sigma, "error": torch.tensor([[0.5, 2.0]] * 4),
    }  # fmt: skip
    count = given["valid"].view(4, pairs, 2).sum(-1).double()
    keys = k.double().masked_fill(~given["valid"][:, None, :, None], 0).unflatten(2, (pairs, 2))
    mean = keys.sum(3) / count.clamp(min=1)[:, None, :, None]
    half = (keys[:, :, :, 0] - keys[:, :, :, 1]) / 2 * (count == 2)[:, None, :, None]
    standard, half = (mean - center[:, :, None]) / sigma[:, :, None].double(), half / sigma[:, :, None]

    def check(result: None, **told: Any) -> None:
        codes, levels, sizes, bias = (told[name].cpu() for name in ("codes", "levels", "sizes", "bias"))
        others_untouched(codes, levels, sizes, bias)
        ids = given["ids"]
        close(bias[ids], count.log(), 1e-6, 1e-6)
        scale, size = (x[ids].double() for x in unpack_halves(sizes))
        outlier, size = size.signbit(), size.abs()
        close(scale, standard.abs().amax(-1) / seal.LEVELS, 2**-8, 1e-12)
        close(size, seal.STEP * half.square().mean(-1).sqrt(), 2**-8, 1e-12)
        code = unpack_codes(codes[ids], pairs, dim).double()
        assert code.abs().max() < seal.OFFSET
        rounding = (standard - code * scale[..., None]).abs() / scale[..., None]
        assert (rounding <= 0.5 + 2**-5).all()  # the largest code times a scale that was rounded down
        level = unpack_levels(levels[ids]).double()
        cell = (half / size.clamp(min=seal.LEAST)[..., None]).floor().clamp(-2, 1) + 2
        assert (level == cell).double().mean() > 0.999  # fp32 puts what lies on an edge on either side of it
        missed = (standard - code * scale[..., None]).square() + (half - (level - 1.5) * size[..., None]).square()
        above = missed.mean(-1) / (seal.OUTLIER * kept["error"].double()[..., None])
        there = (count > 0)[:, None].expand_as(above)
        assert (outlier == (there & (above > 1)))[(above - 1).abs() > 1e-4].all()
        assert outlier[0, 1, 1]
        assert not outlier[2].any()  # no token counts

    return Case(seal.seal_submeans, {**given, **kept}, check)
