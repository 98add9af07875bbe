"""Packed records as kernels read them: a format's functions, chosen when a kernel is compiled.

A launcher gives its kernel None (no block is packed) or a NamedTuple of the format with a field `record_bytes`. The
kernel is compiled for its type, and the functions below call those of the format's `Reader`. The address of a packed
block has a 1 in its lowest bit, so that a table may mix packed and plain blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import types
from numba.extending import overload

from hf_offload.cpu.launch import jit


class Reader(NamedTuple):
    """Compiled functions of a format; `record` is an address without the mark.

    Args:
        score: (heads, record, ahead, query, dim, block_size, scores, stride, spare), as `block.score_block`.
        add_values: (heads, record, ahead, dim, block_size, weights, stride, sums, spare): adds all values of a record
            times the weights, as `block.add_block`; a weight of 0 excludes a token.
        add_keys: (heads, record, dim, block_size, weights, stride, sums, spare), the same for the keys.
        unpack: (tag, address, key, value, token, count, dim, block_size), writes tokens of a record, packed (with the
            mark) or plain in the tag's dtype, as float32 at the addresses `key` and `value`.
        spare_bytes: (dim, block_size), bytes of scratch (`spare`) that these need for one register tile of heads.
    """

    score: Callable[..., None]
    add_values: Callable[..., None]
    add_keys: Callable[..., None]
    unpack: Callable[..., None]
    spare_bytes: Callable[[int, int], int]


READERS: dict[type, Reader] = {}
"""Readers by the NamedTuple of their format."""


@jit
def is_packed(address: int) -> bool:
    """Whether an address is that of a packed block."""
    return address & 1 != 0


def score_packed(packed: Any, *args: Any) -> None:
    """`Reader.score` of a format."""
    raise TypeError("for compiled code")


def add_packed_values(packed: Any, *args: Any) -> None:
    """`Reader.add_values` of a format."""
    raise TypeError("for compiled code")


def add_packed_keys(packed: Any, *args: Any) -> None:
    """`Reader.add_keys` of a format."""
    raise TypeError("for compiled code")


def unpack_tokens(packed: Any, *args: Any) -> None:
    """`Reader.unpack` of a format."""
    raise TypeError("for compiled code")


def spare_bytes(packed: Any, dim: int, block_size: int) -> int:
    """`Reader.spare_bytes` of a format; 0 without packed blocks."""
    raise TypeError("for compiled code")


def _call_reader(packed: Any, function: str) -> Callable[..., Any]:
    """What a kernel calls, for Numba's type of `packed`."""
    if isinstance(packed, types.NoneType):
        return lambda packed, *args: 0
    found = getattr(READERS[packed.instance_class], function)
    return lambda packed, *args: found(*args)


overload(score_packed)(lambda packed, *args: _call_reader(packed, "score"))
overload(add_packed_values)(lambda packed, *args: _call_reader(packed, "add_values"))
overload(add_packed_keys)(lambda packed, *args: _call_reader(packed, "add_keys"))
overload(unpack_tokens)(lambda packed, *args: _call_reader(packed, "unpack"))
overload(spare_bytes)(lambda packed, *args: _call_reader(packed, "spare_bytes"))
