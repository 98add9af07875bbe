# mypy: ignore-errors
"""Triton kernels for flags in host memory; see `flags.py`."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def signal_kernel(flag, epoch):
    """One program; the release orders all that the stream wrote before it."""
    tl.atomic_xchg(flag, tl.load(epoch), sem="release", scope="sys")


@triton.jit
def _behind(flag, want):
    # Adding 0 compiles to a plain load with acquire order. Were it a read and a write, it could undo the host's write.
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys") - want


@triton.jit
def wait_kernel(flag, epoch, late, spins):
    """One program."""
    want = tl.load(epoch)
    behind = _behind(flag, want)
    left = spins
    while (behind < 0) & (left > 0):
        behind = _behind(flag, want)
        left -= 1
    if behind < 0:
        tl.store(late, 1)
