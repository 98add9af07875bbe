"""Merge of three attention partials on the CPU by log-sum-exp."""

from __future__ import annotations

import math

import numpy as np

from hf_offload.cpu.launch import F32, Array, Launch, kernel, require
from hf_offload.cpu.memory import address_of, count_up, hold, next_task
from hf_offload.cpu.simd.vectors import fma, load_f32, splat, store


@kernel
def join_kernel(
    ticket: Array, tasks: int, out: Array, lse: Array, one_out: Array, one_lse: Array, two_out: Array, two_lse: Array
) -> None:
    """One task = one row."""
    heads, dim = out.shape[1], out.shape[2]
    b = count_up(ticket, 0)
    while b < tasks:
        for h in range(heads):
            peak = max(lse[b, h], max(one_lse[b, h], two_lse[b, h]))
            if lse[b, h] == -np.inf and one_lse[b, h] == -np.inf and two_lse[b, h] == -np.inf:
                continue  # the peak alone does not tell: `max` may skip a NaN, which must spread
            own, one, two = math.exp(lse[b, h] - peak), math.exp(one_lse[b, h] - peak), math.exp(two_lse[b, h] - peak)
            total = own + one + two
            here = address_of(out[b, h])
            for source, share in ((address_of(one_out[b, h]), one), (address_of(two_out[b, h]), two)):
                if share > 0.0:  # a partial over no token may hold any bytes
                    weight, keep = splat(np.float32(share / total)), splat(np.float32(own / total))
                    for d in range(0, 4 * dim, 64):
                        store(here + d, fma(load_f32(source + d), weight, load_f32(here + d) * keep))
                    own = total
            if own != total:
                keep = splat(np.float32(own / total))
                for d in range(0, 4 * dim, 64):
                    store(here + d, load_f32(here + d) * keep)
            lse[b, h] = peak + math.log(total)
        b = next_task(ticket)
    hold((out, one_out, two_out))


def join_parts(out: Array, lse: Array, one: tuple[Array, Array], two: tuple[Array, Array]) -> Launch:
    """Prepare the merge of two partials into a third.

    Args:
        out, lse: float32 [B, Hq, D], D a multiple of 16, and [B, Hq], natural log; overwritten with the result.
        one, two: (out, lse) of the two other partials; where lse is −inf, out is ignored; a NaN in lse spreads.

    Raises:
        ValueError: shapes that contradict each other or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    if out.shape[-1] % 16:
        raise ValueError(f"head dimension {out.shape[-1]} is not a multiple of 16; pad the heads")
    for array, total in ((out, lse), one, two):
        require("out", array, F32, (*lse.shape, out.shape[-1]))
        require("lse", total, F32, lse.shape)
    return Launch(join_kernel, len(out), (out, lse, *one, *two), 3 * out.nbytes)
