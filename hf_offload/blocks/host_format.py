"""Formats of older blocks in host memory: the model's dtype, or packed int8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload.cpu.kernels.int8_blocks import Int8Records, pack_records, packed_bytes, unpack_records
from hf_offload.cpu.launch import Launch
from hf_offload.gpu.kv_copy import PackedLayout


@dataclass(frozen=True, slots=True)
class HostFormat:
    """The model's dtype: no block is packed. Subclasses pack a block once it is full and old.

    Args:
        dtype: dtype of the model's K and V.
        head_dim, block_size: sizes of a block.
    """

    packs: ClassVar[bool] = False
    """Whether older blocks are packed, so that kernels must check each block."""
    read_by_device: ClassVar[bool] = True
    """Whether GPU kernels read its records; otherwise the CPU unpacks what the device fetches."""
    dtype: torch.dtype
    head_dim: int
    block_size: int

    @property
    def packed(self) -> Any:
        """How CPU kernels read packed records (`cpu.kernels.packed`); None: nothing is packed."""
        return None

    @property
    def record_bytes(self) -> int:
        """Bytes of a packed record (one block and KV head); 0 if nothing is packed."""
        return 0 if self.packed is None else int(self.packed.record_bytes)

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype of gathered tokens."""
        return self.dtype

    @property
    def device_layout(self) -> PackedLayout | None:
        """Layout of packed records for GPU kernels, or None if they read none."""
        return None

    def pack(
        self, keys: np.ndarray, values: np.ndarray, key_step: int, value_step: int, records: np.ndarray,
        keep: tuple[Any, ...] = (),
    ) -> Launch:  # fmt: skip
        """Prepare packing full records; arguments as in `cpu.kernels.int8_blocks.pack_records`."""
        raise NotImplementedError(f"{type(self).__name__} packs nothing")

    def unpack(
        self, records: np.ndarray, tokens: np.ndarray, counts: np.ndarray, keys: np.ndarray, values: np.ndarray,
        keep: tuple[Any, ...] = (),
    ) -> Launch:  # fmt: skip
        """Prepare reading tokens of records, packed or not, in `gather_dtype`; arguments as in `unpack_records`."""
        raise NotImplementedError(f"{type(self).__name__} packs nothing")


class Int8(HostFormat):
    """Int8 codes; in bfloat16 a scale and a middle for each channel of K, a scale for each token of V."""

    __slots__ = ()
    packs = True

    @property
    def packed(self) -> Int8Records:
        return Int8Records(packed_bytes(self.head_dim, self.block_size))

    @property
    def gather_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device_layout(self) -> PackedLayout:
        codes = 2 * self.block_size * self.head_dim
        return PackedLayout(self.record_bytes, codes, codes + 4 * self.head_dim)

    def pack(
        self, keys: np.ndarray, values: np.ndarray, key_step: int, value_step: int, records: np.ndarray,
        keep: tuple[Any, ...] = (),
    ) -> Launch:  # fmt: skip
        return pack_records(
            keys, values, key_step, value_step, records, kv_dtype=self.dtype, dim=self.head_dim,
            block_size=self.block_size, keep=keep,
        )  # fmt: skip

    def unpack(
        self, records: np.ndarray, tokens: np.ndarray, counts: np.ndarray, keys: np.ndarray, values: np.ndarray,
        keep: tuple[Any, ...] = (),
    ) -> Launch:  # fmt: skip
        return unpack_records(
            records, tokens, counts, keys, values, kv_dtype=self.dtype, dim=self.head_dim, block_size=self.block_size,
            keep=keep,
        )  # fmt: skip


FORMATS: dict[str | None, type[HostFormat]] = {None: HostFormat, "int8": Int8}
"""Formats by the value of the knob `host_dtype`."""
