"""What kernels read of a layer's blocks, as one object: another one whenever an array or tensor of it is another."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch


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
        table, block_ptr: as `View` has them (`TableMirror`).
        slots, block_of, slot_of, worth, known: of the `ResidentSet`.
        state: of the policy.
        digests: the tensors of the digests; empty where none can be made yet.
    """

    table: torch.Tensor
    block_ptr: torch.Tensor
    slots: torch.Tensor
    block_of: torch.Tensor
    slot_of: torch.Tensor
    worth: torch.Tensor
    known: torch.Tensor
    state: Any
    digests: tuple[torch.Tensor, ...]

    def names(self, other: DeviceView) -> bool:
        """Whether another one names the same objects."""
        *mine, digests = (getattr(self, name) for name in self.__slots__)
        *theirs, others = (getattr(other, name) for name in self.__slots__)
        same = all(map(operator.is_, mine, theirs)) and len(digests) == len(others)
        return same and all(map(operator.is_, digests, others))
