# mypy: ignore-errors
"""Triton kernel that joins partials by log-sum-exp."""

import triton
import triton.language as tl

from .paged_kernels import LN2, LOG2E


@triton.jit(do_not_specialize=["splits"])
def join(
    out,  # [B, Hq, S, D]
    lse,  # [B, Hq, S]
    host_out,  # [B, Hq, D] or None, like the four that follow
    host_lse,  # [B, Hq]
    kbar,  # [B, Hq, D]
    predicted,  # [B, Hq, D]
    sinks,  # [Hq]
    query,  # [B, Hq, D]
    merged,  # [B, Hq, D]
    merged_lse,  # [B, Hq]
    scale,
    splits,  # S
    HEADS: tl.constexpr,  # Hq
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program = one query head of one row."""
    head = tl.program_id(0)
    dim = tl.arange(0, D_PAD)
    real = dim < D
    split = tl.arange(0, S_PAD)
    lse += head * splits
    peak = tl.max(tl.load(lse + split, mask=split < splits, other=float("-inf")), 0)
    # The host's tensors may be pinned memory that is written while this graph runs: volatile loads are never cached.
    if host_out is not None:
        there = tl.load(host_lse + head, volatile=True)
        host = tl.load(host_out + head * D + dim, mask=real, other=0.0, volatile=True)  # here: one wait for all reads
        if kbar is not None:
            bar = tl.load(kbar + head * D + dim, mask=real, other=0.0, volatile=True)
            guess = tl.load(predicted + head * D + dim, mask=real, other=0.0, volatile=True)
            drift = tl.load(query + head * D + dim, mask=real, other=0.0).to(tl.float32) - guess
            there = tl.where(there == float("-inf"), there, there + scale * tl.sum(drift * bar, 0))
        peak = tl.maximum(peak, there)
    if sinks is not None:
        sink = tl.load(sinks + head % HEADS)
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)

    total = 0.0
    acc = tl.zeros([D_PAD], tl.float32)
    for start in range(0, splits, CHUNK):
        part = start + tl.arange(0, CHUNK)
        weight = tl.exp2((tl.load(lse + part, mask=part < splits, other=float("-inf")) - base) * LOG2E)
        where = (head.to(tl.int64) * splits + part)[:, None] * D + dim[None, :]
        piece = tl.load(out + where, mask=(weight > 0.0)[:, None] & real[None, :], other=0.0)
        acc += tl.sum(piece * weight[:, None], 0)
        total += tl.sum(weight, 0)
    if host_out is not None:
        weight = tl.exp2((there - base) * LOG2E)
        acc += tl.where(weight > 0.0, host, 0.0) * weight
        total += weight
    if sinks is not None:
        total += tl.exp2((sink - base) * LOG2E)
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    tl.store(merged + head * D + dim, (acc / total).to(merged.dtype.element_ty), mask=real)
    tl.store(merged_lse + head, tl.where(some, base + tl.log2(total) * LN2, float("-inf")))
