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
def bound_of_best(keys, n, want):
    """Where the `want` largest keys of a row end: see `is_best`. Ties go to the lower n.

    Args:
        keys: int32 [N], see `ordered`; NEVER does not count.
        n: [N], 0, 1, 2, ...
        want: scalar; nothing is wanted below 1.

    Returns:
        The bound, and the end of those that equal it.
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
    # The end of the ties is the lowest number with enough of them before it.
    tied = (keys == bound) & (keys != NEVER)
    room = want - tl.sum((keys > bound).to(tl.int32), 0)
    ties = tl.sum(tied.to(tl.int32), 0)
    end = tl.where(ties > 0, tl.max(n, 0) + 1, 0)
    first = tl.where(ties > room, 0, end)
    while first < end:
        half = (first + end) >> 1
        before = tl.sum((tied & (n < half)).to(tl.int32), 0)
        first = tl.where(before >= room, first, half + 1)
        end = tl.where(before >= room, half, end)
    return bound, end


@triton.jit
def is_best(keys, n, bound, end):
    """Which keys of the entries n are among the best, after `bound_of_best`."""
    return (keys > bound) | ((keys == bound) & (n < end))
