"""Compiled variants of the kernels that move KV."""

from __future__ import annotations

from typing import Any

from hf_offload.cpu.kernels.int8_blocks import packed_bytes
from hf_offload.gpu import kv_copy

_INTS = {"heads": "i32", "slots": "i32"}
_FETCH = {
    "into": "*i32", "chosen": "*i32", "counts": "*i32", "block_ptr": "*i64", "table": "*i32", **_INTS,
    "lines": "i32", "moves": "i32", "width": "i32",
}  # fmt: skip
_WRITE = {
    "slot_of": "*i32", "limits": "*i32", "k_row": "i32", "k_head": "i32", "v_row": "i32", "v_head": "i32", **_INTS,
    "blocks": "i32",
}  # fmt: skip
_STORE = {
    "block_ptr": "*i64", "table": "*i32", "first": "i32", "stop": "i32", "k_row": "i32", "k_head": "i32",
    "k_token": "i32", "v_row": "i32", "v_head": "i32", "v_token": "i32", "lines": "i32", "heads": "i32", "width": "i32",
}  # fmt: skip
_KINDS = {"bf16": (2, 3.3895313892515355e38), "fp16": (2, 65504.0), "fp32": (4, 3.4028234663852886e38)}


def cases() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernels at real sizes."""
    found: list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]] = []
    for kind, dim, size in (("bf16", 64, 32), ("bf16", 80, 16), ("fp16", 128, 32), ("bf16", 256, 64), ("fp32", 128, 8)):
        nbytes, top = _KINDS[kind]
        tokens, width = kv_copy.tile(size, dim, nbytes)
        shape = {"SIZE": size, "D": dim, "WIDTH": width}
        record = {**shape, "TOKENS": tokens, "RECORD": 2 * size * dim * nbytes}
        pool, one, four = {"pool": f"*{kind}"}, {"num_warps": 1, "num_stages": 1}, {"num_warps": 4, "num_stages": 1}
        name = f"{kind} D{dim} block {size}"
        token = {**pool, **_WRITE, "k": f"*{kind}", "v": f"*{kind}"}
        found.append((f"write_token {name}", kv_copy.write_token_kernel, token, shape, one))
        store = {**pool, "slot_of": "*i32", "block_ptr": "*i64", "table": "*i32", "block": "i32", **_INTS}
        store |= {"blocks": "i32", "width": "i32"}
        found.append((f"store_block {name}", kv_copy.store_block_kernel, store, record, four))
        tokens_of = {**_STORE, "k": f"*{kind}", "v": f"*{kind}"}
        found.append((f"store_tokens {name}", kv_copy.store_tokens_kernel, tokens_of, record, four))
        plain = {"LINES": 64, **kv_copy.pieces(size, dim, nbytes)}
        found.append((f"fetch {name}", kv_copy.fetch_kernel, {**pool, **_FETCH}, plain, four))
        layout = {"PACKED": packed_bytes(dim, size), "WORDS": 2 * size * dim, "VALUE_SCALES": 2 * (size + 2) * dim}
        layout |= {"TOP": top, "LINES": 64}
        found.append(
            (f"fetch {name} int8", kv_copy.fetch_packed_kernel, {**pool, **_FETCH}, {**record, **layout}, four)
        )
    return found
