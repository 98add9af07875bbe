"""Compiled variants of the scores and their join: head sizes of real models with their default blocks."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import digest_scores
from hf_offload.gpu.digest_scores import join_sizes, submean_sizes, vector_sizes


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    integers = dict.fromkeys(("codes_ptr", "levels_ptr", "sizes_ptr", "table_ptr", "limits_ptr"), "*i32")
    scalars = {"scale": "fp32", "softcap": "fp32", "kv_heads": "i32", "blocks": "i32"}
    options = {"num_warps": 4, "num_stages": 3}

    def signature(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
        return {name: (integers | scalars).get(name, "*fp32") for name in kernel.arg_names if name not in constants}

    found = []
    for group, width, capped in ((4, 128, False), (7, 160, True), (2, 512, True)):
        kernel, constants = digest_scores.score_vectors_kernel, vector_sizes(group, width) | {"CAPPED": capped}
        found.append(
            (f"vectors of {width}{' softcap' * capped}", kernel, signature(kernel, constants), constants, options)
        )
    for group, pairs, dim in ((4, 16, 128), (7, 8, 64), (1, 16, 80), (3, 4, 96), (2, 64, 256), (16, 32, 128)):
        capped = pairs == 8 or dim == 256
        kernel, constants = digest_scores.score_submeans_kernel, submean_sizes(group, pairs, dim) | {"CAPPED": capped}
        found.append(
            (f"{pairs} pairs of {dim}{' softcap' * capped}", kernel, signature(kernel, constants), constants, options)
        )
    for group, join in ((1, "raw"), (4, "max"), (7, "mean"), (16, "max")):
        kernel, constants = digest_scores.join_heads_kernel, {"JOIN": join, **join_sizes(group)}
        found.append((f"join by {join} of {group}", kernel, signature(kernel, constants), constants, {"num_warps": 4}))
    return found
