"""The hand-over of a layer's work to the CPU: query and blocks in pinned memory, a flag there, the wait for the answer.

Flags hold epochs, int32 that both sides count and that wrap around. The step's epoch lies in device memory, so that a
captured graph can be replayed with another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch

from .backend import ON_TRITON, constexpr, jit, require, tl

F32, I32 = (torch.float32,), (torch.int32,)
_CHUNK = 512  # what the 128 threads of a program write at a time, 16 bytes each
_SPIN_SECONDS = 1e-6  # about what one look across the bus takes


@dataclass(frozen=True)
class Inbox:
    """Host memory that takes in one hand-over after the other.

    Args:
        query: `[B, Hq, D]` fp32.
        blocks: `[B, Hkv, C]` int32.
        counts: `[B, Hkv]` int32.
        arrived: `[1]` int32 on the device, 0, for this inbox alone; None: the memory is not pinned, so that kernels
            cannot reach it and copies do the work.
        tail: `[B, Hq]` fp32, or None: it takes in none.
        limits: `[2]` int32, or None, where there is no tail.

    Raises:
        ValueError: shapes or layouts that do not fit.
        TypeError: another dtype.
    """

    query: torch.Tensor
    blocks: torch.Tensor
    counts: torch.Tensor
    arrived: torch.Tensor | None
    tail: torch.Tensor | None = None
    limits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        batch, heads = self.counts.shape
        if self.query.ndim != 3 or self.query.shape[0] != batch or self.query.shape[1] % heads:
            raise ValueError(f"query {tuple(self.query.shape)} does not fit counts {(batch, heads)}")
        require(
            None,
            query=(self.query, F32, self.query.shape),
            blocks=(self.blocks, I32, (batch, heads, self.blocks.shape[-1])),
            counts=(self.counts, I32, (batch, heads)),
            **_more(self.query, self.tail, self.limits),
        )


def _more(query: torch.Tensor, tail: torch.Tensor | None, limits: torch.Tensor | None) -> dict[str, Any]:
    """What `require` asks of a tail and of limits; raise unless both are there or none."""
    if (tail is None) != (limits is None):
        raise ValueError("tail and limits belong together: give both or none")
    return {} if tail is None else {"tail": (tail, F32, query.shape[:2]), "limits": (limits, I32, (2,))}


def hand_over(
    to: Inbox,
    query: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    tail: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    *,
    flag: torch.Tensor | None = None,
    epoch: torch.Tensor | None = None,
) -> None:
    """Bring a query and a list of blocks into host memory, and announce them there if there is a flag.

    The host may read the inbox when it has waited for the stream, or has seen the epoch in the flag.

    Args:
        to: written; entries of `blocks` from the counts on may be anything afterwards.
        query, blocks, counts: as those of `to`, on one device; entries of `blocks` from the counts on may be anything.
        tail: `[B, Hq]` fp32, the log mass of the tail; None exactly where `to` has none.
        limits: `[2]` int32, tokens of every row with the query's, and blocks with digests; given with `tail`.
        flag: `[1]` int32, takes the epoch when all of it is visible to the host; pinned memory if the epoch is on a
            GPU. None: the host is not notified.
        epoch: `[1]` int32, None without a flag.

    Raises:
        ValueError: shapes, devices or layouts that do not fit, memory that is not pinned, or one of `flag` and `epoch`
            without the other.
        TypeError: another dtype.
    """
    if (tail is None) != (to.tail is None):
        raise ValueError("tail and to.tail belong together: the one is stored in the other, or neither is given")
    require(
        query.device,
        query=(query, F32, to.query.shape),
        blocks=(blocks, I32, to.blocks.shape),
        counts=(counts, I32, to.counts.shape),
        **_more(query, tail, limits),
    )
    if (flag is None) != (epoch is None):
        raise ValueError("flag and epoch belong together: the one is stored in the other, or neither is given")
    if flag is not None and epoch is not None:
        _check_flag(flag, epoch)
    if to.arrived is None or query.device.type not in ON_TRITON:
        more = (to.tail, tail), (to.limits, limits), (flag, epoch)
        _by_copies(((to.query, query), (to.blocks, blocks), (to.counts, counts), *more))
        return
    (batch, heads), group = counts.shape, query.shape[1] // counts.shape[1]
    hand_over_kernel[(batch * heads,)](
        query, blocks, counts, tail, limits, to.query, to.blocks, to.counts, to.tail, to.limits,
        None if flag is None else to.arrived, flag, epoch, blocks.shape[2], NUMBERS=group * query.shape[2], GROUP=group,
        CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip


def wait_for_flag(flag: torch.Tensor, epoch: torch.Tensor, late: torch.Tensor, *, spins: int) -> None:
    """Let the stream wait until a flag has reached the epoch; what was written before the flag is visible behind this.

    The wait is bounded. If the wait times out, the stream continues, and the next read of `late` raises `WorkerError`.
    Once `late` is set, later waits return at once: a result that never comes costs one timeout, not one a layer.

    Args:
        flag: `[1]` int32, written by the host; pinned memory if the epoch is on a GPU.
        epoch: `[1]` int32, not 0.
        late: `[1]` int32, on the device or pinned; 0 becomes the epoch if the flag was not there in time.
        spins: how often to look again at most; each look takes about a microsecond.

    Raises:
        ValueError: another shape, memory that is not pinned, or a negative `spins`.
        TypeError: another dtype.
    """
    _check_flag(flag, epoch)
    require(None, late=(late, (torch.int32,), (1,)))
    if spins < 0:
        raise ValueError(f"spins={spins} is not a number of looks")
    if epoch.device.type not in ON_TRITON:
        _wait_by_torch(flag, epoch, late, spins)
        return
    wait_kernel[(1,)](flag, epoch, late, spins, num_warps=1)


def _check_flag(flag: torch.Tensor, epoch: torch.Tensor) -> None:
    """Raise unless flag and epoch are one number each, and the host reaches the flag."""
    require(None, flag=(flag, (torch.int32,), (1,)), epoch=(epoch, (torch.int32,), (1,)))
    capturing = epoch.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    # During a capture `is_pinned` must not be called; the code that captures has checked its flags.
    if epoch.device.type == "cuda" and not capturing and not (flag.device.type == "cpu" and flag.is_pinned()):
        raise ValueError(f"the flag lies on {flag.device} and is not pinned; use torch.zeros(..., pin_memory=True)")


def _by_copies(copies: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    for target, source in copies:
        if target is not None and source is not None:
            target.copy_(source, non_blocking=True)


def _wait_by_torch(flag: torch.Tensor, epoch: torch.Tensor, late: torch.Tensor, spins: int) -> None:
    missed = int(late) != 0
    limit = time.monotonic() + spins * _SPIN_SECONDS
    while int(flag - epoch) < 0:  # int32, so that it wraps around
        if missed or time.monotonic() >= limit:
            if not missed:
                late.copy_(epoch)
            return
        time.sleep(0)


INTERPRETED = constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # as Triton reads it when it is imported
# Scalars are every thread's: the first one stores.
_RELEASE = constexpr("""{
.reg .pred first;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first st.release.sys.global.b32 [$1], $2;
mov.b32 $0, $2;
}""")


@jit(do_not_specialize=["capacity"])
@no_type_check
def hand_over_kernel(
    query,  # [B, Hq, D]
    blocks,  # [B, Hkv, C]
    counts,  # [B, Hkv]
    tail,  # [B, Hq] or None
    limits,  # [2] or None
    to_query,  # these five in host memory
    to_blocks,
    to_counts,
    to_tail,
    to_limits,
    arrived,  # [1] or None, like the two that follow
    flag,  # [1] in host memory
    epoch,  # [1]
    capacity,  # C
    NUMBERS: tl.constexpr,  # of the query, for one KV head
    GROUP: tl.constexpr,  # Hq / Hkv
    CHUNK: tl.constexpr,
):
    """One program = one row and KV head; the last one to arrive announces all of them."""
    line = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    count = tl.load(counts + line)
    tl.store(to_counts + line, count)
    for start in range(0, NUMBERS, CHUNK):
        in_range = start + at < NUMBERS
        place = line * NUMBERS + start + at
        tl.store(to_query + place, tl.load(query + place, mask=in_range), mask=in_range)
    if tail is not None:
        head = line * GROUP + at
        tl.store(to_tail + head, tl.load(tail + head, mask=at < GROUP), mask=at < GROUP)
        if line == 0:
            tl.store(to_limits + at, tl.load(limits + at, mask=at < 2), mask=at < 2)
    at = tl.arange(0, CHUNK // 4)  # one for each thread: where the list ends no thread may write several
    for start in range(0, count, CHUNK // 4):
        in_range = start + at < count
        place = line * capacity + start + at
        tl.store(to_blocks + place, tl.load(blocks + place, mask=in_range), mask=in_range)
    if flag is not None:
        # All threads have written: one orders that before its arrival, and the last one to arrive all before the flag.
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        if before == tl.num_programs(0) - 1:
            tl.store(arrived, 0)  # for the next hand-over
            announce(flag, tl.load(epoch))


@jit
@no_type_check
def announce(flag, epoch):
    """Store an int32 behind all that this program has written or seen.

    A plain store: not every bus between a GPU and its host carries atomic operations, and one that reads and writes
    would wait for the host's memory first.
    """
    if INTERPRETED:
        tl.store(flag, epoch)
    else:
        tl.inline_asm_elementwise(_RELEASE, "=r,l,r,~{memory}", [flag, epoch], dtype=tl.int32, is_pure=False, pack=1)


@jit
@no_type_check
def wait_kernel(flag, epoch, late, spins):
    """One program."""
    want, missed = tl.load(epoch), tl.load(late, volatile=True)
    behind = _behind(flag, want)
    left = tl.where(missed == 0, spins, 0)
    while (behind < 0) & (left > 0):
        behind = _behind(flag, want)
        left -= 1
    if (behind < 0) & (missed == 0):
        tl.store(late, want)


@jit
@no_type_check
def _behind(flag, want):
    # Adding 0 compiles to a plain load with acquire order. Were it a read and a write, it could undo the host's write.
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys") - want
