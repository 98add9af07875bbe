"""The operations of `hf_offload.gpu` that take most of a step: inputs of real sizes, bytes they must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.options import Options
from gpu.timing import nothing
from hf_offload.gpu import block_topk, digest_scores, kv_copy
from hf_offload.gpu import exchange as exchanging
from hf_offload.gpu import handover as handing
from hf_offload.gpu import paged_attention as attention
from hf_offload.gpu.merge import HostResult, merge


@dataclass(frozen=True)
class Size:
    """One size.

    Args:
        batch, kv_heads, group, dim, block: as everywhere.
        chosen: blocks of a row and KV head that are attended or resident.
        context: blocks of a row.
    """

    batch: int
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    block: int = 32
    chosen: int = 64
    context: int = 4096

    @property
    def lines(self) -> tuple[int, int]:
        """`B, Hkv`."""
        return self.batch, self.kv_heads

    @property
    def heads(self) -> tuple[int, int]:
        """`B, Hq`."""
        return self.batch, self.kv_heads * self.group


QUICK = Size(2, kv_heads=2, group=2, dim=16, block=8, chosen=4, context=16)


def size_of(options: Options, batch: int) -> Size:
    """What a step of so many rows has; with `quick` a tiny one."""
    return QUICK if options.quick else Size(batch)


@dataclass(frozen=True)
class Operation:
    """One call to be timed.

    Args:
        call: makes it.
        device_bytes: that it has to read or write in device memory.
        link_bytes: that have to come from pinned host memory (`back`: go there).
        prepare: done before each call, untimed.
        keep: what the call reaches only by address.
    """

    call: Callable[[], Any]
    device_bytes: int = 0
    link_bytes: int = 0
    prepare: Callable[[], Any] = nothing
    back: bool = False
    keep: tuple[Any, ...] = ()


class Inputs:
    """Makes tensors for one size on the device."""

    def __init__(self, options: Options, size: Size) -> None:
        self.options, self.size = options, size
        torch.manual_seed(0)
        self.limits = self.ints([size.context * size.block, size.context - 1])  # the last block is not sealed
        self.sinks = self.ints([0] * size.batch), self.ints([1] * size.batch)  # the first block of each row

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, dtype=dtype, device=self.options.device)

    def ints(self, values: Any) -> torch.Tensor:
        """int32."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.options.device)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of that shape and dtype in the host's memory."""
        return torch.zeros(like.shape, dtype=like.dtype, pin_memory=self.options.on_gpu)

    def query(self) -> torch.Tensor:
        """`[B, Hq, D]`."""
        return self.floats(*self.size.heads, self.size.dim)

    def pool(self) -> torch.Tensor:
        """`[B, Hkv, R, 2, block, D]`, as many slots as blocks are chosen."""
        size = self.size
        return self.floats(*size.lines, size.chosen, 2, size.block, size.dim, dtype=self.options.dtype)

    def slots(self) -> torch.Tensor:
        """`[B, Hkv, C]`: all slots, in any order."""
        return torch.rand(*self.size.lines, self.size.chosen, device=self.options.device).argsort(-1).int()

    def blocks(self) -> torch.Tensor:
        """`[B, Hkv, C]`: chosen blocks, ascending, spread over the context, the last one among them."""
        step = self.size.context // self.size.chosen
        return self.ints(torch.arange(step - 1, self.size.context, step)).expand(*self.size.lines, -1).contiguous()

    def counts(self, number: int) -> torch.Tensor:
        """`[B, Hkv]`."""
        return self.ints([number]).expand(self.size.lines).contiguous()

    def table(self, physical: int) -> torch.Tensor:
        """`[B, N]`: which of the physical blocks a row has."""
        return self.ints(torch.arange(self.size.batch * self.size.context) % physical).view(self.size.batch, -1)

    @property
    def scores_bytes(self) -> int:
        """Of a float32 for each query head and block."""
        return 4 * self.size.heads[0] * self.size.heads[1] * self.size.context


def paged_attention(x: Inputs) -> Operation:
    query, pool = x.query(), x.pool()
    listing = pool, x.slots(), x.blocks(), x.counts(x.size.chosen), x.limits, None
    out, lse = attention.paged_attention(query, *listing, scale=0.1)
    nbytes = query.nbytes + pool.nbytes + out.nbytes + lse.nbytes
    return Operation(lambda: attention.paged_attention(query, *listing, scale=0.1), nbytes)


def merge_with_host(x: Inputs) -> Operation:
    """The merge of the device's shares with a partial of the CPU, which lies in pinned memory, where it is read."""
    splits = attention.count_splits(x.size.batch * x.size.kv_heads, x.size.chosen * x.size.block)
    out, lse = x.floats(*x.size.heads, splits, x.size.dim), x.floats(*x.size.heads, splits)
    there, kbar, mass = x.pinned(x.query()), x.pinned(x.query()), x.pinned(x.query()[..., 0])
    query, host = x.query(), HostResult(there, mass, kbar, x.query())
    read = out.nbytes + lse.nbytes + 2 * query.nbytes + query.numel() * x.options.dtype.itemsize
    call = lambda: merge(out, lse, host, query, None, scale=0.1, dtype=x.options.dtype)  # noqa: E731
    return Operation(call, read, there.nbytes + mass.nbytes + kbar.nbytes)


def score_submeans(x: Inputs) -> Operation:
    size, some = x.size, {"dtype": torch.int32, "device": x.options.device}
    physical, pairs = size.batch * size.context, size.block // 2
    codes = torch.randint(-(2**31), 2**31 - 1, (physical, size.kv_heads, pairs * size.dim // 8), **some)
    levels = torch.randint(-(2**31), 2**31 - 1, (physical, size.kv_heads, size.dim // 16, pairs), **some)
    sizes = torch.full((physical, size.kv_heads, pairs), 0x3D803D80, **some)
    bias = torch.full((physical, pairs), 0.7, device=x.options.device)
    center, sigma = (x.floats(size.batch, size.kv_heads, size.dim) for _ in range(2))
    given = x.query(), codes.view(torch.uint8), levels, sizes, bias, center, sigma, x.table(physical)
    nbytes = sum(part.nbytes for part in given) + x.scores_bytes
    return Operation(lambda: digest_scores.score_submeans(*given, x.limits, scale=0.1), nbytes)


def score_vectors(x: Inputs) -> Operation:
    size, physical = x.size, x.size.batch * x.size.context
    vectors, bias = x.floats(physical, size.kv_heads, 2 * size.dim), x.floats(physical)
    given = x.floats(*size.heads, 2 * size.dim), vectors, bias, x.table(physical)
    nbytes = sum(part.nbytes for part in given) + x.scores_bytes
    return Operation(lambda: digest_scores.score_vectors(*given, x.limits), nbytes)


def select_blocks(x: Inputs) -> Operation:
    score, chosen = x.floats(*x.size.lines, x.size.context), x.size.chosen
    knobs = {"block_size": x.size.block, "recent": 1, "k": chosen, "capacity": chosen}
    nbytes = score.nbytes + x.blocks().nbytes + x.counts(0).nbytes
    return Operation(lambda: block_topk.select_blocks(score, x.limits, *x.sinks, **knobs), nbytes)


def exchange(x: Inputs) -> Operation:
    worth, known = x.floats(*x.size.lines, x.size.context), x.ints([x.size.context - 1])
    blocks, slots = x.blocks(), x.slots()
    slot_of = x.ints([-1]).expand(*x.size.lines, x.size.context).scatter(2, blocks.long(), slots)
    block_of = torch.empty_like(blocks).scatter_(2, slots.long(), blocks)
    before = block_of.clone(), slot_of.clone()

    def restore() -> None:
        block_of.copy_(before[0])
        slot_of.copy_(before[1])

    def call() -> Any:
        return exchanging.exchange(worth, known, block_of, slot_of, *x.sinks, x.limits, recent=1, due=None)

    return Operation(call, worth.nbytes + slot_of.nbytes + 4 * block_of.nbytes, prepare=restore)


def _fetch(x: Inputs, share: float) -> Operation:
    """A pinned slab `[P, Hkv, 2, block, D]`, of whose blocks a share of the slots is fetched."""
    size, pool, physical = x.size, x.pool(), min(x.size.context, 512)
    slab = x.pinned(pool[0, 0, :1].expand(physical, size.kv_heads, *pool.shape[3:])).normal_()
    addresses = (slab.data_ptr() + slab[0].nbytes * torch.arange(physical)).to(x.options.device)
    count = max(1, round(share * size.chosen))
    moves = x.slots()[:, :, :count].contiguous(), x.blocks()[:, :, :count].contiguous(), x.counts(count)
    table = x.ints(torch.randint(physical, (size.batch, size.context)))
    moved = moves[0].numel() * pool[0, 0, 0].nbytes
    call = lambda: kv_copy.fetch(pool, *moves, addresses, table, packed=None)  # noqa: E731
    return Operation(call, moved, moved, keep=(slab,))


def fetch_recall(x: Inputs) -> Operation:
    return _fetch(x, 0.08)


def fetch_all(x: Inputs) -> Operation:
    return _fetch(x, 1.0)


def hand_over(x: Inputs) -> Operation:
    """What the CPU attends with for five blocks a head, announced by a flag."""
    chosen = min(5, x.size.chosen)
    given = x.query(), x.blocks(), x.counts(chosen)
    inbox = handing.Inbox(*map(x.pinned, given), x.ints([0]))
    flag, epoch = x.pinned(x.ints([0])), x.ints([1])
    sent = given[0].nbytes + (chosen + 1) * given[2].nbytes
    call = lambda: handing.hand_over(inbox, *given, flag=flag, epoch=epoch)  # noqa: E731
    return Operation(call, sent, sent, back=True, keep=(inbox,))


def add_one(x: Inputs) -> Operation:
    """Next to nothing: `in_graph` is what one more small kernel costs a captured step."""
    number = x.floats(1)
    return Operation(lambda: number.add_(1), 2 * number.nbytes)


OPERATIONS: dict[str, Callable[[Inputs], Operation]] = {
    operation.__name__: operation
    for operation in (
        add_one, paged_attention, score_submeans, score_vectors, select_blocks, exchange, fetch_recall, fetch_all,
        hand_over, merge_with_host,
    )
}  # fmt: skip
