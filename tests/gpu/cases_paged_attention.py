"""Compiled variants of attention over slots: dtypes and head sizes of real models, and all features at once."""

from __future__ import annotations

from typing import Any

import torch

from hf_offload.gpu import paged_attention
from hf_offload.gpu.paged_attention import tile_sizes

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def listing_signature(dtype: str) -> dict[str, str]:
    """Types of the arguments that describe a query, a pool and a listing of its blocks."""
    integers = dict.fromkeys(("slots", "blocks", "counts", "limits"), "*i32")
    return {"query": f"*{dtype}", "pool": f"*{dtype}", **integers, "valid": "*u8"}


def listing_constants(dtype: str, dim: int, size: int, group: int) -> dict[str, Any]:
    """Compile-time sizes as the launchers choose them."""
    query = torch.empty(1, 8 * group, dim, dtype=TYPES[dtype], device="meta")
    return tile_sizes(query, torch.empty(1, 8, 4, 2, size, dim, dtype=TYPES[dtype], device="meta"))


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    scalars = {"scale": "fp32", "softcap": "fp32"}
    sizes = dict.fromkeys(("slots_there", "width", "tokens"), "i32")
    found = []
    for dtype, dim, size, group, full in (
        ("bf16", 64, 16, 7, False),
        ("bf16", 128, 32, 4, False),
        ("bf16", 128, 32, 4, True),
        ("bf16", 256, 64, 2, True),
        ("fp16", 80, 32, 1, False),
        ("fp32", 128, 32, 4, False),
        ("fp32", 256, 128, 2, True),
    ):
        signature = {**listing_signature(dtype), "out": "*fp32", "lse": "*fp32", **scalars, **sizes}
        constants = {**listing_constants(dtype, dim, size, group), "CAPPED": full, **({} if full else {"valid": None})}
        name = f"{dtype} D {dim} block {size}{' softcap padding' if full else ''}"
        found.append(
            (name, paged_attention.paged_attention_kernel, signature, constants, {"num_warps": 4, "num_stages": 3})
        )
    return found
