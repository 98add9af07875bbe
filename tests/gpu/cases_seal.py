"""Compiled variants of sealing."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import seal
from hf_offload.gpu.seal import submean_sizes, vector_sizes


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    strides = dict.fromkeys(("block_stride", "head_stride", "token_stride", "heads"), "i32")
    integers = dict.fromkeys(("codes_ptr", "levels_ptr", "sizes_ptr"), "*i32")
    types = {"ids_ptr": "*i64", "valid_ptr": "*i1", **integers, **strides}
    found = []
    for dtype, tokens, dim in (("bf16", 32, 128), ("fp16", 8, 80), ("fp32", 128, 256), ("bf16", 64, 64)):
        for kernel, constants in (
            (seal.seal_submeans_kernel, submean_sizes(tokens, dim)),
            (seal.seal_vectors_kernel, {"BOUNDS": True, **vector_sizes(tokens, dim)}),
            (seal.seal_vectors_kernel, {"BOUNDS": False, **vector_sizes(tokens, dim)}),
        ):
            names = [name for name in kernel.arg_names if name not in constants]
            signature = {name: f"*{dtype}" if name == "k_ptr" else types.get(name, "*fp32") for name in names}
            kind = {None: "pairs", True: "bounds", False: "means"}[constants.get("BOUNDS")]
            found.append((f"{kind} {dtype} {tokens} tokens of {dim}", kernel, signature, constants, {"num_warps": 4}))
    return found
