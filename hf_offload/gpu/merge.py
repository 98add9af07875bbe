"""The merge of attention over disjoint sets of keys by log-sum-exp: the device's splits, the CPU's result, sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch

from hf_offload.scores import softmax

from .backend import FLOATS, ON_TRITON, jit, next_power_of_2, require, tl
from .paged_attention import LN2, LOG2E

F32 = (torch.float32,)
_TILE = 1024  # numbers of the shares that a program, one warp, has in its registers at a time


@dataclass(frozen=True)
class HostResult:
    """What the CPU attended; fp32 tensors on the device or in pinned host memory, which the kernel reads where it lies.

    Ordinary loads of pinned memory see what the CPU wrote: the CPU stores its flag in release order behind its results.
    A kernel that stands before this one in the stream (`handover.wait_kernel`) reads the flag in acquire order at
    system scope. Its end comes before the start of this kernel, and no cache of the device keeps host memory from one
    kernel to the next. (`tests/gpu/test_graph_cuda.py` replays steps whose partial the CPU changes each time.)

    Args:
        out: `[B, Hq, D]`.
        lse: `[B, Hq]`, natural log; −inf = nothing was attended, and `out` and `kbar` may be anything.
        kbar: `[B, Hq, D]`, the mean key under the attention weights, if the query was a predicted one.
        predicted: `[B, Hq, D]`, the predicted query; given with `kbar` or not at all.
    """

    out: torch.Tensor
    lse: torch.Tensor
    kbar: torch.Tensor | None = None
    predicted: torch.Tensor | None = None


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    host: HostResult | None,
    query: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join partials over disjoint keys into attention over all of them.

    A result that was computed with a predicted query counts to first order as if it had met the real one:
    lse + scale·(query − predicted)·kbar.

    Args:
        out: `[B, Hq, S, D]` fp32, the device's shares.
        lse: `[B, Hq, S]` fp32 (natural log); −inf = nothing was attended.
        host: the CPU's result, or None.
        query: `[B, Hq, D]`, the real query.
        sinks: `[Hq]` fp32, logits that take weight and give nothing, or None.
        scale: softmax scale.
        dtype: of the result.

    Returns:
        merged `[B, Hq, D]` in `dtype` and lse `[B, Hq]` fp32 (natural log), sinks included; 0 and −inf where there is
        nothing.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: shapes or devices that do not fit together, or one of `kbar` and `predicted` without the other.
    """
    if out.ndim != 4 or out.shape[2] < 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected [B, Hq, S, D]")
    if dtype not in FLOATS:
        raise TypeError(f"cannot merge into {dtype}")
    batch, heads, splits, dim = out.shape
    require(
        out.device,
        out=(out, F32, out.shape),
        lse=(lse, F32, (batch, heads, splits)),
        query=(query, FLOATS, (batch, heads, dim)),
        **({} if sinks is None else {"sinks": (sinks, F32, (heads,))}),
    )
    if host is not None:
        each = (F32, (batch, heads, dim))
        tensors = {"host.lse": (host.lse, F32, (batch, heads)), "host.out": (host.out, *each)}
        if host.kbar is not None and host.predicted is not None:
            tensors |= {"host.kbar": (host.kbar, *each), "host.predicted": (host.predicted, *each)}
        elif host.kbar is not host.predicted:
            raise ValueError("kbar and predicted belong together: both correct a predicted query, or neither is given")
        require(None, **tensors)
    if out.device.type not in ON_TRITON:
        merged, total = _by_torch(out, lse, host, query, sinks, scale)
        return merged.to(dtype), total
    merged = torch.empty(batch, heads, dim, dtype=dtype, device=out.device)
    total = torch.empty(batch, heads, dtype=torch.float32, device=out.device)
    # Triton takes pinned CPU tensors as they are and refuses other CPU tensors beside a GPU.
    parts = (None,) * 4 if host is None else (host.out, host.lse, host.kbar, host.predicted)
    merge_kernel[(batch * heads,)](
        out, lse, *parts, sinks, query, merged, total, scale, splits, **merge_sizes(heads, splits, dim), num_warps=1
    )
    return merged, total


def merge_sizes(heads: int, splits: int, dim: int) -> dict[str, int]:
    """The compile-time sizes of the kernel; the number of shares is rounded up, so that few variants are compiled."""
    padded, width = next_power_of_2(splits), next_power_of_2(dim)
    return {
        "HEADS": heads, "D": dim, "D_PAD": width, "S_PAD": padded, "CHUNK": max(min(padded, _TILE // width), 1),
    }  # fmt: skip


def _by_torch(
    out: torch.Tensor, lse: torch.Tensor, host: HostResult | None, query: torch.Tensor, sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if host is not None:
        host_lse = host.lse
        if host.kbar is not None and host.predicted is not None:
            shift = scale * ((query.float() - host.predicted) * host.kbar).sum(-1)
            host_lse = torch.where(host_lse == float("-inf"), host_lse, host_lse + shift)
        out = torch.cat([out, host.out.unsqueeze(2)], 2)
        lse = torch.cat([lse, host_lse.unsqueeze(2)], 2)
    weights, total = softmax(
        lse if sinks is None else torch.cat([lse, sinks.view(1, -1, 1).expand(len(lse), -1, 1)], 2)
    )
    weights = weights[:, :, : lse.shape[2], None]
    return (out * weights).masked_fill(weights == 0.0, 0.0).sum(2), total


@jit(do_not_specialize=["splits"])
@no_type_check
def merge_kernel(
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
    """One program, one warp = one query head of one row."""
    head = tl.program_id(0)
    dim = tl.arange(0, D_PAD)
    real = dim < D
    split = tl.arange(0, S_PAD)
    lse += head * splits
    peak = tl.max(tl.load(lse + split, mask=split < splits, other=float("-inf")), 0)
    if host_out is not None:
        lse_of_host = tl.load(host_lse + head)
        host = tl.load(host_out + head * D + dim, mask=real, other=0.0)  # here: one wait for all reads across the bus
        if kbar is not None:
            bar = tl.load(kbar + head * D + dim, mask=real, other=0.0)
            guess = tl.load(predicted + head * D + dim, mask=real, other=0.0)
            drift = tl.load(query + head * D + dim, mask=real, other=0.0).to(tl.float32) - guess
            lse_of_host = tl.where(
                lse_of_host == float("-inf"), lse_of_host, lse_of_host + scale * tl.sum(drift * bar, 0)
            )
        peak = tl.maximum(peak, lse_of_host)
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
        weight = tl.exp2((lse_of_host - base) * LOG2E)
        acc += tl.where(weight > 0.0, host, 0.0) * weight
        total += weight
    if sinks is not None:
        total += tl.exp2((sink - base) * LOG2E)
    some = total > 0.0
    total = tl.where(some, total, 1.0)
    tl.store(merged + head * D + dim, (acc / total).to(merged.dtype.element_ty), mask=real)
    tl.store(merged_lse + head, tl.where(some, base + tl.log2(total) * LN2, float("-inf")))
