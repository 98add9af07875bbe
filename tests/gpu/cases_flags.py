"""Compiled variants of the kernels for flags."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import flags_kernels


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernels; they have one size."""
    options = {"num_warps": 1, "num_stages": 1}
    pair = {"flag": "*i32", "epoch": "*i32"}
    return [
        ("signal", flags_kernels.signal_kernel, pair, {}, options),
        ("wait", flags_kernels.wait_kernel, {**pair, "late": "*i32", "spins": "i32"}, {}, options),
    ]
