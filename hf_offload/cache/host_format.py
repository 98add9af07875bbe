"""How old blocks lie in host memory: as they came, in the model's dtype, or packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_offload.cpu.kernels.int8_blocks import pack_records, packed_bytes, unpack_records
from hf_offload.cpu.launch import Launch
from hf_offload.gpu.kv_copy import PackedLayout


@dataclass(frozen=True, slots=True)
class HostFormat:
    """The model's dtype: blocks stay as they came. Other formats pack a block when it is full and old.

    Args:
        dtype: of K and V as they come.
        head_dim, block_size: sizes.
    """

    packs: ClassVar[bool] = False
    """Whether old blocks are packed, so that kernels must look which are."""
    dtype: torch.dtype
    head_dim: int
    block_size: int

    @property
    def record_bytes(self) -> int:
        """Bytes of the packed block of one KV head."""
        return 0

    @property
    def gather_dtype(self) -> torch.dtype:
        """What tokens are gathered in."""
        return self.dtype

    @property
    def device_layout(self) -> PackedLayout | None:
        """How packed records lie, for kernels that read them on the device."""
        return None

    def pack(
        self, keys: np.ndarray, values: np.ndarray, key_step: int, value_step: int, records: np.ndarray,
        keep: tuple[Any, ...] = (),
    ) -> Launch:  # fmt: skip
        """Prepare packing full blocks of one KV head each; arguments as in `cpu.kernels.int8_blocks.pack_records`."""
        raise NotImplementedError(f"{type(self).__name__} packs nothing")

    def unpack(
        self, records: np.ndarray, tokens: np.ndarray, counts: np.ndarray, keys: np.ndarray, values: np.ndarray,
        keep: tuple[Any, ...] = (),
    ) -> Launch:  # fmt: skip
        """Prepare reading tokens of records, packed or not, in `gather_dtype`; arguments as in `unpack_records`."""
        raise NotImplementedError(f"{type(self).__name__} packs nothing")


class Int8(HostFormat):
    """Codes in int8 with a bfloat16 scale for each channel of the keys and each token of the values."""

    __slots__ = ()
    packs = True

    @property
    def record_bytes(self) -> int:
        return packed_bytes(self.head_dim, self.block_size)

    @property
    def gather_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device_layout(self) -> PackedLayout:
        codes = 2 * self.block_size * self.head_dim
        return PackedLayout(self.record_bytes, codes, codes + 2 * self.head_dim)

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
"""By the knob `host_dtype`."""
