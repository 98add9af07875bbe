"""Checks of a file's contents; each raises a ValueError that names the field and the expected value."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import torch

from hf_offload.knobs import shown


class Field(NamedTuple):
    """The dtype, shape and values that a tensor of a file must have.

    Args:
        dtype: the dtype.
        shape: for each axis its size, the allowed sizes, or a name; axes of one name have one size of at least 1.
        least, most: inclusive bounds of the values, or one for each entry of the last axis; None: any value, also NaN
            if both are None.
    """

    dtype: torch.dtype
    shape: tuple[int | Container[int] | str, ...] = ()
    least: float | Sequence[float] | None = None
    most: float | Sequence[float] | None = None


def check_tensors(where: str, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Field]) -> None:
    """Check that a file has exactly the tensors of a table, each as its field says.

    Args:
        where: prefix of the names in messages, with its separator.
        tensors: the file's tensors by name.
        fields: the expected tensors by name.

    Raises:
        ValueError: a tensor is missing, unexpected, or does not fit its field.
    """
    if wrong := sorted(tensors.keys() ^ fields.keys()):
        raise ValueError(f"{where}{shown(wrong[0])} is {'missing' if wrong[0] in fields else 'unexpected'}")
    sizes: dict[str, int] = {}
    for name, field in fields.items():
        tensor, name = tensors[name], where + name
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if tensor.dtype != field.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {field.dtype}")
        fits = tensor.ndim == len(field.shape)
        for have, want in zip(tensor.shape, field.shape, strict=False):
            if isinstance(want, str):
                fits &= 0 < have == sizes.setdefault(want, have)
            else:
                fits &= have == want if isinstance(want, int) else have in want
        if not fits:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(field.shape)}")
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        for bound, within in ((field.least, torch.ge), (field.most, torch.le)):
            if bound is None:
                continue
            bounds = torch.tensor(bound, dtype=wide, device=tensor.device).view(-1)  # 0-d would take the narrower dtype
            if not within(tensor, bounds).all():
                raise ValueError(f"{name} has values that are not within {field.least} … {field.most}")


def prefixed(prefix: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return a table of fields with a prefix on each name."""
    return {prefix + name: field for name, field in fields.items()}


class LayerSizes(NamedTuple):
    """Sizes of a layer of a saved cache, which determine the shapes of its tensors.

    Args:
        rows, kv_heads, head_dim, block_size, dtype: sizes and dtype of the layer's blocks.
        query_heads: the possible numbers of query heads.
        tokens: tokens of each row; width: capacity of the block table in blocks.
        placed: whether the resident set has been decided.
        slots: the possible numbers of resident blocks of a row and KV head.
    """

    rows: int
    kv_heads: int
    query_heads: Collection[int]
    head_dim: int
    block_size: int
    dtype: torch.dtype
    tokens: int
    width: int
    placed: bool
    slots: range

    @property
    def lines(self) -> tuple[int, int]:
        """The shape (rows, KV heads)."""
        return self.rows, self.kv_heads

    @property
    def full_blocks(self) -> int:
        """Full blocks of a row."""
        return self.tokens // self.block_size
