# mypy: ignore-errors
"""What the kernels that choose and exchange blocks share: floats as ordered integers, the best of a row."""

import triton
import triton.language as tl

NEVER = tl.constexpr(-(2**31))
"""The key of -inf and NaN, below the key of every other float."""


@triton.jit
def ordered(x):
    """Integers in the order of the floats x; both zeros are equal."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(x > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)


@triton.jit
def keys_between(worth_ptr, n, first, end):
    """Keys of the blocks n of a row that are from `first` on and before `end`; NEVER for the others."""
    return ordered(tl.load(worth_ptr + n, mask=(n >= first) & (n < end), other=float("-inf")))


@triton.jit
def bound_of_best(keys, want):
    """The bound of the `want` largest keys of a row: those above it, and the first ones equal to it.

    Args:
        keys: int32 [N], see `ordered`; NEVER does not count.
        want: scalar; nothing is wanted below 1.

    Returns:
        The bound, and how many of the keys that equal it are wanted.
    """
    usable = tl.sum((keys != NEVER).to(tl.int32), 0)
    # The bound is the largest key that at least `want` keys reach. Ends early where exactly that many do.
    above = tl.max(keys, 0).to(tl.int64)
    below = tl.min(tl.where(keys == NEVER, 0x7FFFFFFF, keys), 0).to(tl.int64)
    below = tl.where((want > 0) & (usable > want), below, above)
    while below < above:
        middle = (below + above + 1) >> 1
        found = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        below = tl.where(found >= want, middle, below)
        above = tl.where(found > want, above, tl.where(found == want, middle, middle - 1))
    bound = tl.where(usable <= want, NEVER, below.to(tl.int32))
    bound = tl.where(want > 0, bound, 0x7FFFFFFF)  # above the key of every float
    return bound, want - tl.sum((keys > bound).to(tl.int32), 0)


@triton.jit
def is_best(keys, bound, room, ties):
    """Which keys of a piece of a row are among the best.

    Args:
        keys: int32 [n].
        bound, room: from `bound_of_best`.
        ties: how many keys before this piece equal the bound.

    Returns:
        bool [n], and `ties` for the next piece.
    """
    tied = ((keys == bound) & (keys != NEVER)).to(tl.int32)
    chosen = (keys > bound) | ((tied != 0) & (ties + tl.cumsum(tied, 0) <= room))
    return chosen, ties + tl.sum(tied, 0)
