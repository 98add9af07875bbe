"""The operations of `hf_offload.gpu` that take most of a step: inputs of real sizes, bytes they must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.options import Options
from gpu.timing import nothing
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
        back: whether link_bytes go to the host.
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

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, dtype=dtype, device=self.options.device)

    def ints(self, values: Any) -> torch.Tensor:
        """int32."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.options.device)

    def pool(self) -> torch.Tensor:
        """`[B, Hkv, R, 2, block, D]`, as many slots as blocks are chosen."""
        size = self.size
        return self.floats(*size.lines, size.chosen, 2, size.block, size.dim, dtype=self.options.dtype)

    def query(self) -> torch.Tensor:
        """`[B, Hq, D]`."""
        return self.floats(*self.size.heads, self.size.dim)

    def limits(self) -> torch.Tensor:
        """Everything is there, the last block is not sealed."""
        return self.ints([self.size.context * self.size.block, self.size.context - 1])

    def sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first block of each row."""
        return self.ints([0] * self.size.batch), self.ints([1] * self.size.batch)

    def slots(self) -> torch.Tensor:
        """`[B, Hkv, C]`: all slots, in any order."""
        order = torch.rand(*self.size.lines, self.size.chosen, device=self.options.device)
        return order.argsort(-1).int()

    def blocks(self) -> torch.Tensor:
        """`[B, Hkv, C]`: chosen blocks, ascending, spread over the context, the last one among them."""
        size = self.size
        step = size.context // size.chosen
        spread = torch.arange(size.chosen) * step + step - 1
        return self.ints(spread).expand(*size.lines, -1).contiguous()

    def counts(self, number: int) -> torch.Tensor:
        """`[B, Hkv]`."""
        return self.ints([number]).expand(self.size.lines).contiguous()

    def slot_of(self, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`[B, Hkv, N]` where these blocks are in these slots."""
        nowhere = self.ints([-1]).expand(*self.size.lines, self.size.context).contiguous()
        return nowhere.scatter_(2, blocks.long(), slots)

    def listing(self) -> tuple[torch.Tensor | None, ...]:
        """What operations over a listing take, from `pool` to `valid`."""
        return self.pool(), self.slots(), self.blocks(), self.counts(self.size.chosen), self.limits(), None

    def records(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A pinned slab `[P, Hkv, 2, block, D]`, the addresses of its blocks and a table `[B, N]` of them."""
        size, physical = self.size, min(self.size.context, 512)
        shape = (physical, size.kv_heads, 2, size.block, size.dim)
        slab = torch.empty(shape, dtype=self.options.dtype, pin_memory=self.options.on_gpu).normal_()
        addresses = slab.data_ptr() + slab[0].nbytes * torch.arange(physical)
        table = self.ints(torch.randint(physical, (size.batch, size.context)))
        return slab, addresses.to(self.options.device), table


def paged_attention(x: Inputs) -> Operation:
    from hf_offload.gpu.paged_attention import paged_attention as operation

    query, listing = x.query(), x.listing()
    out, lse = operation(query, *listing, scale=0.1)
    return Operation(
        lambda: operation(query, *listing, scale=0.1), query.nbytes + listing[0].nbytes + out.nbytes + lse.nbytes
    )


def _shares(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    from hf_offload.gpu.paged_attention import count_splits

    size = x.size
    splits = count_splits(size.batch * size.kv_heads, size.chosen * size.block)
    return x.floats(*size.heads, splits, size.dim), x.floats(*size.heads, splits)


def device_partial(x: Inputs, host: HostResult) -> Callable[[], object]:
    """The merge of the device's shares with a partial of the CPU."""
    (out, lse), query = _shares(x), x.query()
    return lambda: merge(out, lse, host, query, None, scale=0.1, dtype=x.options.dtype)


def merge_with_host(x: Inputs) -> Operation:
    """The partial lies in pinned memory, where the kernel reads it."""
    pin, heads = x.options.on_gpu, x.size.heads
    there, kbar = (torch.randn(*heads, x.size.dim, pin_memory=pin) for _ in range(2))
    mass = torch.randn(heads, pin_memory=pin)
    host = HostResult(there, mass, kbar, x.query())
    out, lse = _shares(x)
    query = x.query()
    read = out.nbytes + lse.nbytes + 2 * query.nbytes + query.numel() * x.options.dtype.itemsize
    return Operation(device_partial(x, host), read, there.nbytes + mass.nbytes + kbar.nbytes)


def score_submeans(x: Inputs) -> Operation:
    from hf_offload.gpu.digest_scores import score_submeans as operation

    size, device = x.size, x.options.device
    physical, pairs = size.batch * size.context, size.block // 2
    some = {"dtype": torch.int32, "device": device}
    codes = torch.randint(-(2**31), 2**31 - 1, (physical, size.kv_heads, pairs * size.dim // 8), **some)
    levels = torch.randint(-(2**31), 2**31 - 1, (physical, size.kv_heads, size.dim // 16, pairs), **some)
    sizes = torch.full((physical, size.kv_heads, pairs), 0x3D803D80, **some)
    bias = torch.full((physical, pairs), 0.7, device=device)
    center, sigma = (x.floats(size.batch, size.kv_heads, size.dim) for _ in range(2))
    table = x.ints(torch.arange(physical).view(size.batch, -1))
    query, limits = x.query(), x.limits()
    digests = (codes.view(torch.uint8), levels, sizes, bias, center, sigma)
    written = 4 * size.heads[0] * size.heads[1] * size.context
    return Operation(
        lambda: operation(query, *digests, table, limits, scale=0.1),
        sum(part.nbytes for part in digests) + table.nbytes + query.nbytes + written,
    )


def score_vectors(x: Inputs) -> Operation:
    from hf_offload.gpu.digest_scores import score_vectors as operation

    size, physical = x.size, x.size.batch * x.size.context
    ready = x.floats(*size.heads, 2 * size.dim)
    vectors, bias = x.floats(physical, size.kv_heads, 2 * size.dim), x.floats(physical)
    table, limits = x.ints(torch.arange(physical).view(size.batch, -1)), x.limits()
    written = 4 * size.heads[0] * size.heads[1] * size.context
    return Operation(
        lambda: operation(ready, vectors, bias, table, limits),
        ready.nbytes + vectors.nbytes + bias.nbytes + table.nbytes + written,
    )


def select_blocks(x: Inputs) -> Operation:
    from hf_offload.gpu.block_topk import select_blocks as operation

    score, limits, sinks = x.floats(*x.size.lines, x.size.context), x.limits(), x.sinks()
    knobs = {"block_size": x.size.block, "recent": 1, "k": x.size.chosen, "capacity": x.size.chosen}
    return Operation(
        lambda: operation(score, limits, *sinks, **knobs), score.nbytes + x.blocks().nbytes + x.counts(0).nbytes
    )


def exchange(x: Inputs) -> Operation:
    from hf_offload.gpu.exchange import exchange as operation

    worth, known = x.floats(*x.size.lines, x.size.context), x.ints([x.size.context - 1])
    blocks, slots = x.blocks(), x.slots()
    slot_of = x.slot_of(blocks, slots)
    block_of = torch.empty_like(blocks).scatter_(2, slots.long(), blocks)
    before = block_of.clone(), slot_of.clone()
    limits, sinks = x.limits(), x.sinks()

    def restore() -> None:
        block_of.copy_(before[0])
        slot_of.copy_(before[1])

    return Operation(
        lambda: operation(worth, known, block_of, slot_of, *sinks, limits, recent=1, due=None),
        worth.nbytes + slot_of.nbytes + 4 * block_of.nbytes, prepare=restore,
    )  # fmt: skip


def _moves(x: Inputs, share: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    moved = max(1, round(share * x.size.chosen))
    return x.slots()[:, :, :moved].contiguous(), x.blocks()[:, :, :moved].contiguous(), x.counts(moved)


def _fetch(x: Inputs, share: float) -> Operation:
    from hf_offload.gpu.kv_copy import fetch as operation

    pool, (slots, blocks, counts) = x.pool(), _moves(x, share)
    slab, addresses, table = x.records()
    moved = slots.numel() * pool[0, 0, 0].nbytes
    return Operation(
        lambda: operation(pool, slots, blocks, counts, addresses, table, packed=None), moved, moved, keep=(slab,)
    )


def fetch_recall(x: Inputs) -> Operation:
    return _fetch(x, 0.08)


def fetch_all(x: Inputs) -> Operation:
    return _fetch(x, 1.0)


def hand_over(x: Inputs) -> Operation:
    """What the CPU attends with for five blocks a head, announced by a flag."""
    from hf_offload.gpu.handover import Inbox
    from hf_offload.gpu.handover import hand_over as operation

    chosen, pin = min(5, x.size.chosen), x.options.on_gpu
    query, blocks, counts = x.query(), x.blocks(), x.counts(chosen)
    there = (torch.zeros(part.shape, dtype=part.dtype, pin_memory=pin) for part in (query, blocks, counts))
    inbox = Inbox(*there, x.ints([0]))
    flag, epoch = torch.zeros(1, dtype=torch.int32, pin_memory=pin), x.ints([1])
    sent = query.nbytes + (chosen + 1) * counts.nbytes
    return Operation(
        lambda: operation(inbox, query, blocks, counts, flag=flag, epoch=epoch), sent, sent, back=True, keep=(inbox,)
    )


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
