"""Compiled variants of the hand-over."""

from __future__ import annotations

from typing import Any

from hf_offload.gpu import handover


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Groups and head dimensions of real models, with a flag and without; the wait, which has one size."""
    integers = dict.fromkeys(
        ("blocks", "counts", "to_blocks", "to_counts", "arrived", "flag", "epoch", "limits", "to_limits"), "*i32"
    )
    floats = dict.fromkeys(("query", "to_query", "tail", "to_tail"), "*fp32")
    signature = {**integers, **floats, "capacity": "i32"}
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for group, dim in ((4, 128), (1, 80), (16, 256)):
        for flagged, tail in ((False, False), (True, False), (True, True)):
            constants = {"NUMBERS": group * dim, "GROUP": group, "CHUNK": 512}
            constants |= {} if flagged else dict.fromkeys(("arrived", "flag", "epoch"))
            constants |= {} if tail else dict.fromkeys(("tail", "to_tail", "limits", "to_limits"))
            name = f"{group} heads of {dim}{', announced' if flagged else ''}{', with the tail' if tail else ''}"
            found.append((name, handover.hand_over_kernel, signature, constants, {"num_warps": 4}))
    waiting = {"flag": "*i32", "epoch": "*i32", "late": "*i32", "spins": "i32"}
    return [*found, ("wait", handover.wait_kernel, waiting, {}, {"num_warps": 1, "num_stages": 1})]
