# mypy: ignore-errors
"""Triton kernels for flags in host memory; see `flags.py`."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # as Triton reads it when it is imported

# Scalars are every thread's: the first one stores.
_RELEASE = tl.constexpr("""{
.reg .pred first;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first st.release.sys.global.b32 [$1], $2;
mov.b32 $0, $2;
}""")


@triton.jit
def announce(flag, epoch):
    """Store an int32 behind all that this program has written or seen.

    A plain store: not every bus between a GPU and its host carries atomic operations, and one that reads and writes
    would wait for the host's memory first.
    """
    if INTERPRETED:
        tl.store(flag, epoch)
    else:
        tl.inline_asm_elementwise(_RELEASE, "=r,l,r,~{memory}", [flag, epoch], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal_kernel(flag, epoch):
    """One program; the release orders all that the stream wrote before it."""
    announce(flag, tl.load(epoch))


@triton.jit
def _behind(flag, want):
    # Adding 0 compiles to a plain load with acquire order. Were it a read and a write, it could undo the host's write.
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys") - want


@triton.jit
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
