"""Hand-over between a stream and the host by numbers in pinned memory: both sides count epochs, int32 that wrap around.

The step's epoch lies in device memory, so that a captured graph can be replayed with another one.
"""

from __future__ import annotations

import time

import torch

from .backend import on_triton
from .require import require

_SPIN_SECONDS = 1e-6  # about what one look across the bus takes


def signal(flag: torch.Tensor, epoch: torch.Tensor) -> None:
    """Store the epoch in a flag, when all that the stream has written before is visible to the host.

    Args:
        flag: `[1]` int32, written; pinned host memory if the epoch is on a GPU.
        epoch: `[1]` int32.

    Raises:
        ValueError: another shape, or memory that is not pinned.
        TypeError: another dtype.
    """
    check(flag, epoch)
    if not on_triton(epoch):
        flag.copy_(epoch)
        return
    from . import flags_kernels

    flags_kernels.signal_kernel[(1,)](flag, epoch, num_warps=1)


def wait(flag: torch.Tensor, epoch: torch.Tensor, late: torch.Tensor, *, spins: int) -> None:
    """Let the stream wait until a flag has reached the epoch; what was written before the flag is visible behind this.

    The wait is bounded. If it was in vain the stream goes on, and whoever looks at `late` next raises. Once that is
    set nothing is waited for: what never comes would be waited for by every layer anew.

    Args:
        flag: `[1]` int32, written by the host; pinned memory if the epoch is on a GPU.
        epoch: `[1]` int32, not 0.
        late: `[1]` int32, on the device or pinned; 0 becomes the epoch if the flag was not there in time.
        spins: how often to look again at most; each look takes about a microsecond.

    Raises:
        ValueError: another shape, memory that is not pinned, or a negative `spins`.
        TypeError: another dtype.
    """
    check(flag, epoch)
    require(None, late=(late, (torch.int32,), (1,)))
    if spins < 0:
        raise ValueError(f"spins={spins} is not a number of looks")
    if not on_triton(epoch):
        _wait_by_torch(flag, epoch, late, spins)
        return
    from . import flags_kernels

    flags_kernels.wait_kernel[(1,)](flag, epoch, late, spins, num_warps=1)


def _wait_by_torch(flag: torch.Tensor, epoch: torch.Tensor, late: torch.Tensor, spins: int) -> None:
    missed = int(late) != 0
    limit = time.monotonic() + spins * _SPIN_SECONDS
    while int(flag - epoch) < 0:  # int32, so that it wraps around
        if missed or time.monotonic() >= limit:
            if not missed:
                late.copy_(epoch)
            return
        time.sleep(0)


def check(flag: torch.Tensor, epoch: torch.Tensor) -> None:
    """Raise unless the epoch can be stored in the flag; as `signal` does."""
    require(None, flag=(flag, (torch.int32,), (1,)), epoch=(epoch, (torch.int32,), (1,)))
    capturing = epoch.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    # A capture allows few questions; there the flags are the business of whoever captures.
    if epoch.device.type == "cuda" and not capturing and not (flag.device.type == "cpu" and flag.is_pinned()):
        raise ValueError(f"the flag lies on {flag.device} and is not pinned; use torch.zeros(..., pin_memory=True)")
