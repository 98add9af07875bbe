"""What kernels read of a layer's blocks, as one object: another one whenever an array of it is another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class View(NamedTuple):
    """The arrays of a `BlockStore`, its padding and its digests.

    Lengths, sealed blocks and entries of the arrays change under the same view. Forks share pool and digests, which
    another thread may grow: `BlockStore.view` compares what is there with what was, at every step.

    Args:
        table: int32 `[B, N]`, physical block of each logical one.
        block_ptr: int64 `[P]`, address of each physical block.
        valid: uint8 `[B, T]`; holes: uint8 `[B, N]`; first: int32 `[B]`: as `Padding` has them.
        digest: what identifies the digests' arrays (`DigestStore.identity`).
        revision: of the padding.
        covered: tokens that the arrays have room for.
    """

    table: np.ndarray
    block_ptr: np.ndarray
    valid: np.ndarray
    holes: np.ndarray
    first: np.ndarray
    digest: Any
    revision: int
    covered: int
