"""`View` and `DeviceView`: the arrays and tensors that a step's kernels read, as one object for identity checks."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.kernels.record import HostBlocks


class View(NamedTuple):
    """The arrays of a `BlockStore`, its padding and its digests.

    A view stays valid while lengths, sealed blocks and entries of the arrays change. Forks share pool and digests,
    which another thread may grow; `BlockStore.view` therefore compares all arrays at every step.

    Args:
        blocks: table and addresses of the blocks, and which tokens are valid.
        first: int32 `[B]`, of `Padding`.
        digest: identity of the digests' arrays (`DigestStore.identity`); None while blocks have no digests.
        revision: revision of the padding.
        covered: tokens that the arrays have room for.
    """

    blocks: HostBlocks
    first: np.ndarray
    digest: Any
    revision: int
    covered: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceView:
    """The tensors that a step reads on the device, which a captured CUDA graph reads by address.

    A view stays valid while values change. Views are compared by identity. They hold references to their tensors, so
    that no other tensor reuses the addresses.

    Args:
        parts: block table and addresses (`TableMirror`), the tensors of a `ResidentSet`, the policy's state, and the
            tensors of the digests once their statistics are fixed.
    """

    parts: tuple[Any, ...]

    def names(self, parts: tuple[Any, ...]) -> bool:
        """Whether these are the same objects."""
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))
