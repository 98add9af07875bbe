"""Sizes of the operations that are timed, and tensors of these sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu.options import Options
from gpu.timing import nothing


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
