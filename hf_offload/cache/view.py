"""What kernels read of a layer's blocks, as one object: another one whenever an array or tensor of it is another."""

from __future__ import annotations

import operator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class DeviceView:
    """The tensors that a step reads on the device, which a captured CUDA graph knows by their addresses.

    Their values change under the same view. Views are compared as objects; they hold what they name, so that no other
    tensor comes to lie there.

    Args:
        parts: block table and addresses (`TableMirror`), what a `ResidentSet` consists of, the policy's state, and the
            tensors of the digests, if there can be any yet.
    """

    parts: tuple[Any, ...]

    def names(self, parts: tuple[Any, ...]) -> bool:
        """Whether these are the same objects."""
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))
