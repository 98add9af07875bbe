"""Row numbers as users give them, for reordering, selecting and repeating the rows of a cache."""

from __future__ import annotations

from typing import Any

import torch

from hf_offload.knobs import shown


def row_numbers(what: str, index: Any, count: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    """The rows of an index into `count` rows as int64 `[rows]` on the CPU, none negative; an empty cache takes any.

    Args:
        what: the operation, for errors.
        index: row numbers, a mask or a slice.
        count: rows of the cache.
        dtypes: those that an index may have.

    Raises:
        IndexError: a number beyond the rows.
        TypeError: neither row numbers nor a mask, or a dtype that is not allowed.
        ValueError: a mask of another length, an index of another shape than `[rows]`, or one that keeps no row.
    """
    rows = index
    if not isinstance(index, torch.Tensor):  # what fails for a tensor is memory, not its kind
        try:
            rows = torch.as_tensor(range(count)[index] if isinstance(index, slice) else index, device="cpu")
        except (TypeError, ValueError, RuntimeError):  # text, None, lists of unequal lengths
            raise TypeError(f"{what}: use row numbers or a bool mask, not {shown(index)}") from None
    rows = rows.detach().cpu()
    if rows.layout is not torch.strided:
        raise TypeError(f"{what}: an index of layout {rows.layout}; use to_dense()")
    if rows.ndim != 1:
        raise ValueError(f"{what}: use an index of shape [rows], not {list(rows.shape)}")
    if len(rows) and rows.dtype not in dtypes:
        raise TypeError(f"{what}: an index of dtype {rows.dtype}; use {', '.join(map(str, dtypes))}")
    if rows.dtype == torch.bool:
        if count and len(rows) != count:
            raise ValueError(f"{what}: a mask of {len(rows)} rows, but the cache holds {count}")
        rows = rows.nonzero().flatten()
    rows = rows.to(torch.int64)
    if not count:
        return rows
    if not len(rows):
        raise ValueError(f"{what}: no row is left; call reset() to drop all of them")
    if not -count <= int(rows.min()) <= int(rows.max()) < count:
        raise IndexError(f"{what}: the cache holds rows 0 to {count - 1}, not {rows.tolist()}")
    return rows % count
