"""Compiled variants of the exchange, from a few slots to the maximum."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import exchange
from hf_offload.gpu.block_topk import padded_width
from hf_offload.gpu.exchange import padded_slots


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    def signature(kernel: Any) -> dict[str, str]:
        names = {name: "*i32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
        return names | {"worth_ptr": "*fp32"}

    found = []
    for slots, blocks, due in (
        (64, 1024, True),
        (128, 4096, False),
        (256, 8192, False),
        (512, 16384, True),
        (1024, 16384, True),
    ):
        constants = {"SLOTS": padded_slots(slots), **padded_width(blocks), **({} if due else {"due_ptr": None})}
        options = {"num_warps": constants.pop("num_warps")}
        kernel = exchange.exchange_kernel
        found.append((f"{slots} slots of {blocks} blocks", kernel, signature(kernel), constants, options))
    for slots in (16, 1024):
        kernel, constants = exchange.open_block_kernel, {"CHUNK": padded_slots(slots)}
        found.append((f"open, {slots} slots", kernel, signature(kernel), constants, {"num_warps": 4}))
    return found
