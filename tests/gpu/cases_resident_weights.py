"""Compiled variants of the moving average of attention weights."""

from __future__ import annotations

from typing import Any

from cases_paged_attention import listing_constants, listing_signature

from hf_offload.policies.hgca.kernels import resident_weights


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    numbers = {
        **dict.fromkeys(("scale", "softcap", "alpha", "share"), "fp32"),
        **dict.fromkeys(("after", "slots_there", "width", "tokens"), "i32"),
    }
    found = []
    for dtype, dim, size, group, full in (
        ("bf16", 128, 32, 4, True),
        ("fp16", 80, 16, 1, False),
        ("fp32", 256, 64, 2, True),
    ):
        signature = {"average": "*fp32", **listing_signature(dtype), "lse": "*fp32", **numbers}
        constants = {
            **listing_constants(dtype, dim, size, group),
            "CAPPED": full,
            "LARGEST": full,
            **({} if full else {"valid": None}),
        }
        name = f"{dtype} D {dim} block {size}{' softcap padding peak' if full else ''}"
        found.append((name, resident_weights.update_weights_kernel, signature, constants, {"num_warps": 4}))
    return found
