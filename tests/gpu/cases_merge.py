"""Compiled variants of the merge."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import merge


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    host = dict.fromkeys(("host_out", "host_lse", "kbar", "predicted"), "*fp32")
    found = []
    for dtype, dim, splits, full in (("bf16", 128, 16, True), ("fp16", 80, 1, False), ("fp32", 256, 64, True)):
        signature = {
            "out": "*fp32", "lse": "*fp32", **host, "sinks": "*fp32", "query": f"*{dtype}", "merged": f"*{dtype}",
            "merged_lse": "*fp32", "scale": "fp32", "splits": "i32",
        }  # fmt: skip
        missing = {} if full else dict.fromkeys((*host, "sinks"))
        constants = {**merge.merge_sizes(32, splits, dim), **missing}
        name = f"{dtype} D {dim} shares {splits}{' host correction sinks' if full else ''}"
        found.append((name, merge.merge_kernel, signature, constants, {"num_warps": 1}))
    return found
