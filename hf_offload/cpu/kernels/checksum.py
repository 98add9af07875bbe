"""64-bit checksums of records, computed at memory bandwidth.

Eight lanes take the 64-bit words in turn: x = lane XOR word, halves folded, times a prime, halves folded. Each step is
a bijection, so that a change within one word is always detected. Other accidental changes are missed with a probability
of about 2⁻⁶⁴. The checksum is not cryptographic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_offload.cpu.launch import I64, Array, Launch, jit, kernel, require
from hf_offload.cpu.memory import LINE, count_up, get_word, next_task

PRIME = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
_CHUNK_BYTES = 1 << 18


@jit
def _mix(lane: Any, word: Any) -> Any:
    x = lane ^ word
    x = (x ^ (x >> HALF)) * PRIME
    return x ^ (x >> HALF)


@jit
def _checksum(address: int, nbytes: int) -> Any:
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    e, f, g, h = np.uint64(5), np.uint64(6), np.uint64(7), np.uint64(8)
    for line in range(address, address + nbytes, LINE):
        a, b = _mix(a, get_word(line)), _mix(b, get_word(line + 8))
        c, d = _mix(c, get_word(line + 16)), _mix(d, get_word(line + 24))
        e, f = _mix(e, get_word(line + 32)), _mix(f, get_word(line + 40))
        g, h = _mix(g, get_word(line + 48)), _mix(h, get_word(line + 56))
    total = np.uint64(0)
    for lane in (a, b, c, d, e, f, g, h):  # mixed first: the same change in two lanes must not cancel
        total = _mix(total, _mix(_mix(lane, PRIME), PRIME))
    return total


@kernel
def checksum_kernel(ticket: Array, tasks: int, addresses: Array, nbytes: int, sums: Array, chunk: int) -> None:
    """One task = `chunk` records."""
    task = count_up(ticket, 0)
    while task < tasks:
        for i in range(task * chunk, min((task + 1) * chunk, addresses.shape[0])):
            sums[i] = np.int64(_checksum(addresses[i], nbytes))
        task = next_task(ticket)


def checksum_records(addresses: Array, nbytes: int, sums: Array) -> Launch:
    """Prepare the checksums of n records of the same size.

    Args:
        addresses: int64 [n].
        nbytes: bytes of a record, a multiple of 64.
        sums: int64 [n], written.

    Raises:
        ValueError: a size or memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    require("addresses", addresses, I64, addresses.shape[:1])
    require("sums", sums, I64, addresses.shape)
    if nbytes % LINE:
        raise ValueError(f"records of {nbytes} bytes are not whole lines of {LINE}")
    chunk = max(1, _CHUNK_BYTES // max(1, nbytes))
    args = (addresses, int(nbytes), sums, chunk)
    return Launch(checksum_kernel, -(-len(addresses) // chunk), args, len(addresses) * nbytes)
