"""The checks of what files hold: each raises a ValueError that names the field and what belongs there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from hf_offload.knobs import MOST, check_count, shown

Check: TypeAlias = Callable[[str, Any], None]
"""Checks the value of a name."""


class Field(NamedTuple):
    """What a tensor must be.

    Args:
        dtype: its dtype.
        shape: for each axis its size, the sizes that it may have, or a name: axes of one name are equally long, and not
            empty.
        least, most: bounds of the values, or one for each along the last axis; None: any value is allowed, NaN too.
    """

    dtype: torch.dtype
    shape: tuple[int | Container[int] | str, ...] = ()
    least: float | Sequence[float] | None = None
    most: float | Sequence[float] | None = None


def check_tensors(where: str, found: Mapping[str, torch.Tensor], fields: Mapping[str, Field]) -> None:
    """Check that tensors are those of a table, none missing and none more.

    Args:
        where: what their names are of, with its separator.
        found: by name.
        fields: what they must be.
    """
    if odd := sorted(found.keys() ^ fields.keys()):
        raise ValueError(f"{where}{shown(odd[0])} is {'missing' if odd[0] in fields else 'none that belongs there'}")
    sizes: dict[str, int] = {}
    for name, field in fields.items():
        tensor, name = found[name], where + name
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
        for bound, beyond in ((field.least, torch.lt), (field.most, torch.gt)):
            if bound is not None and beyond(tensor, torch.tensor(bound, dtype=tensor.dtype)).any():
                raise ValueError(f"{name} has values that are not within {field.least} … {field.most}")


def prefixed(prefix: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    """The same table of names with a prefix."""
    return {prefix + name: field for name, field in fields.items()}


def check_mapping(name: str, value: Any, checks: Mapping[str, Check]) -> None:
    """Check a JSON object that has these keys and no others."""
    is_a(dict, name, value)
    if odd := sorted(value.keys() ^ checks.keys()):
        raise ValueError(f"{name}.{shown(odd[0])} is {'missing' if odd[0] in checks else 'none that belongs there'}")
    for key, check in checks.items():
        check(f"{name}.{key}", value[key])


def is_a(kind: type, name: str, value: Any) -> None:
    """Check that a value is of a type."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={shown(value)} is no {kind.__name__}")


def list_of(check: Check, name: str, value: Any, *, length: int | None = None) -> None:
    """Check a JSON array, of some length, by what its items must be."""
    is_a(list, name, value)
    if length not in (None, len(value)):
        raise ValueError(f"{name} has {len(value)} items, not {length}")
    for place, item in enumerate(value):
        check(f"{name}[{place}]", item)


def count(least: int, most: int = MOST) -> Check:
    """The check of a whole number."""
    return partial(check_count, what="a count", least=least, most=most)


def optional(check: Check) -> Check:
    """The same check, which lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


class LayerSizes(NamedTuple):
    """A layer of a saved cache: what the shapes of its tensors follow from.

    Args:
        rows, kv_heads, head_dim, block_size, dtype: of its blocks.
        query_heads: how many there may be.
        tokens: of each row; width: blocks that the table has room for.
        placed: whether it was decided what is resident.
        slots: how many blocks of a row and KV head may be resident.
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
        """Rows and KV heads."""
        return self.rows, self.kv_heads

    @property
    def full_blocks(self) -> int:
        """Blocks of a row that are full."""
        return self.tokens // self.block_size
