"""Packed records as kernels read them: a format's functions, chosen when a kernel is compiled.

A launcher gives its kernel None (no block is packed) or a NamedTuple of the format with a field `record_bytes`. The
kernel is compiled for its type, and the functions below call those of the format's `Reader`. The address of a packed
block has a 1 in its lowest bit, so that a table may mix packed and plain blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import types

from hf_offload.cpu.launch import by_types, jit


class Reader(NamedTuple):
    """Compiled functions of a format; `record` is an address without the mark.

    Args:
        score: (heads, record, ahead, query, dim, block_size, scores, stride, spare), as `block.score_block`.
        add_values: (heads, record, ahead, dim, block_size, weights, stride, sums, spare): adds all values of a record
            times the weights, as `block.add_block`; a weight of 0 excludes a token.
        add_keys: (heads, record, dim, block_size, weights, stride, sums, spare), the same for the keys.
        fetch_pair: (record, token, dim, block_size), prefetches what an even token and the next one take.
        score_pairs: (heads, records, places, first, tokens, end, query, dim, block_size, scores, stride), scores of the
            tokens first..first+tokens-1 of two lists, int64: addresses with the mark, numbers in the records. Two
            tokens side by side are a pair, whose first number is even. It prefetches as many that follow before `end`.
        add_pairs: (heads, part, records, places, first, tokens, dim, block_size, weights, stride, sums, spare), adds
            their values (part 0) or keys (1) times the weights, which are 0 up to a multiple of 16; at most 128 tokens.
        spare_bytes: (dim, block_size), bytes of scratch (`spare`) that these need for one register tile of heads.
    """

    score: Callable[..., None]
    add_values: Callable[..., None]
    add_keys: Callable[..., None]
    fetch_pair: Callable[..., None]
    score_pairs: Callable[..., None]
    add_pairs: Callable[..., None]
    spare_bytes: Callable[[int, int], int]


READERS: dict[type, Reader] = {}
"""Readers by the NamedTuple of their format."""


@jit
def is_packed(address: int) -> bool:
    """Whether an address is that of a packed block."""
    return address & 1 != 0


def _call_reader(packed: Any, name: str) -> Callable[..., Any]:
    """What a kernel calls, for Numba's type of `packed`."""
    if isinstance(packed, types.NoneType):
        return lambda packed, *args: 0
    reader = getattr(READERS[packed.instance_class], name)
    return lambda packed, *args: reader(*args)


def _reader(name: str) -> Callable[..., Any]:
    """A function of `Reader` for compiled code, with the format before its arguments; 0 without packed blocks."""
    return by_types(lambda packed, *args: _call_reader(packed, name), allocating=True)


score_packed, add_packed_values, add_packed_keys = map(_reader, ("score", "add_values", "add_keys"))
fetch_pair, score_packed_pairs, add_packed_pairs = map(_reader, ("fetch_pair", "score_pairs", "add_pairs"))
spare_bytes: Callable[..., int] = _reader("spare_bytes")
