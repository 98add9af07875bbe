"""Compiled variants of block choice and split, from a few blocks to the maximum."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import block_topk
from hf_offload.gpu.block_topk import padded_width


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    arguments = block_topk.select_kernel.arg_names
    select = {name: "*i32" if name.endswith("_ptr") else "i32" for name in arguments} | {"score_ptr": "*fp32"}
    split = dict.fromkeys(block_topk.split_kernel.arg_names, "*i32") | {"capacity": "i32", "width": "i32"}
    found = []
    for blocks in (64, 4096, 8192, 16384):
        constants = padded_width(blocks)
        options = {"num_warps": constants.pop("num_warps")}
        found.append((f"of {blocks} blocks", block_topk.select_kernel, select, constants, options))
    for chunk in (128, 1024):
        found.append((f"split by {chunk}", block_topk.split_kernel, split, {"CHUNK": chunk}, {"num_warps": 4}))
    return found
