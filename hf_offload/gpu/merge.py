"""Joining attention over disjoint sets of keys: the device's shares, the CPU's part, attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import on_triton
from .require import FLOATS, require


@dataclass(frozen=True)
class HostPartial:
    """What the CPU attended; fp32 tensors on the device or in pinned host memory, which the kernel reads where it lies.

    With pinned memory, whatever orders the CPU's writes before the merge stands in the same stream.

    Args:
        out: `[B, Hq, D]`.
        lse: `[B, Hq]`, natural log; −inf = nothing was attended, and `out` and `kbar` may be anything.
        kbar: `[B, Hq, D]`, the mean key under the attention weights, if the query was a predicted one.
        predicted: `[B, Hq, D]`, the predicted query.

    Raises:
        ValueError: one of `kbar` and `predicted` without the other.
    """

    out: torch.Tensor
    lse: torch.Tensor
    kbar: torch.Tensor | None = None
    predicted: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.kbar is None) != (self.predicted is None):
            raise ValueError("kbar and predicted belong together: both correct a predicted query, or neither is given")


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    host: HostPartial | None,
    query: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join partials over disjoint keys into attention over all of them.

    A part that was computed with a predicted query counts to first order as if it had met the real one:
    lse + scale·(query − predicted)·kbar.

    Args:
        out: `[B, Hq, S, D]` fp32, the device's shares.
        lse: `[B, Hq, S]` fp32 (natural log); −inf = nothing was attended.
        host: the CPU's part, or None.
        query: `[B, Hq, D]`, the real query.
        sinks: `[Hq]` fp32, logits that take weight and give nothing, or None.
        scale: softmax scale.
        dtype: of the result.

    Returns:
        merged `[B, Hq, D]` in `dtype` and lse `[B, Hq]` fp32 (natural log), sinks included; 0 and −inf where there is
        nothing.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: shapes or devices that do not fit together.
    """
    _check(out, lse, host, query, sinks, dtype)
    if not on_triton(out):
        merged, total = _by_torch(out, lse, host, query, sinks, scale)
        return merged.to(dtype), total
    from . import merge_kernels

    batch, heads, splits, dim = out.shape
    merged = torch.empty(batch, heads, dim, dtype=dtype, device=out.device)
    total = torch.empty(batch, heads, dtype=torch.float32, device=out.device)
    # Triton takes pinned CPU tensors as they are and refuses other CPU tensors beside a GPU.
    parts = (None,) * 4 if host is None else (host.out, host.lse, host.kbar, host.predicted)
    merge_kernels.join[(batch * heads,)](
        out, lse, *parts, sinks, query, merged, total, scale, splits, **join_sizes(heads, splits, dim), num_warps=4
    )
    return merged, total


def join_sizes(heads: int, splits: int, dim: int) -> dict[str, int]:
    """The compile-time sizes of the kernel; the number of shares is rounded up, so that few variants are compiled."""
    padded = 1 << (splits - 1).bit_length()
    return {
        "HEADS": heads, "D": dim, "D_PAD": 1 << (dim - 1).bit_length(), "S_PAD": padded, "CHUNK": min(padded, 16),
    }  # fmt: skip


def _check(
    out: torch.Tensor, lse: torch.Tensor, host: HostPartial | None, query: torch.Tensor, sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    if out.ndim != 4 or out.shape[2] < 1:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected [B, Hq, S, D]")
    if dtype not in FLOATS:
        raise TypeError(f"cannot merge into {dtype}")
    batch, heads, splits, dim = out.shape
    fp32 = (torch.float32,)
    require(
        out.device,
        out=(out, fp32, out.shape),
        lse=(lse, fp32, (batch, heads, splits)),
        query=(query, FLOATS, (batch, heads, dim)),
    )
    if sinks is not None:
        require(out.device, sinks=(sinks, fp32, (heads,)))
    if host is None:
        return
    each = (batch, heads, dim)
    found = (("lse", host.lse, (batch, heads)), ("out", host.out, each), ("kbar", host.kbar, each))
    parts = (*found, ("predicted", host.predicted, each))
    require(None, **{f"host.{name}": (part, fp32, shape) for name, part, shape in parts if part is not None})


def _by_torch(
    out: torch.Tensor, lse: torch.Tensor, host: HostPartial | None, query: torch.Tensor, sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if host is not None:
        there = host.lse
        if host.kbar is not None and host.predicted is not None:
            shift = scale * ((query.float() - host.predicted) * host.kbar).sum(-1)
            there = torch.where(there == float("-inf"), there, there + shift)
        out = torch.cat([out, host.out.unsqueeze(2)], 2)
        lse = torch.cat([lse, there.unsqueeze(2)], 2)
    logits = lse if sinks is None else torch.cat([lse, sinks.view(1, -1, 1).expand(lse.shape[0], -1, 1)], 2)
    total = logits.logsumexp(2)
    weights = (lse - total.masked_fill(total == float("-inf"), 0.0).unsqueeze(2)).exp().unsqueeze(3)
    return (out * weights).masked_fill(weights == 0.0, 0.0).sum(2), total
