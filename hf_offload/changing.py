"""Crops tokens, and selects, reorders or repeats rows, in all layers of a cache."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_offload.attention.cuda_graph import StepGraph
from hf_offload.attention.hooks import hybrid_layers
from hf_offload.cache.settings import Settings
from hf_offload.cache.transaction import Transaction
from hf_offload.knobs import MOST, shown


class Changing(Cache):
    """A cache that is changed as a whole or not at all, by one thread at a time."""

    settings: Settings
    transaction: Transaction
    graph: StepGraph | None

    def drain(self) -> None:
        """Wait for the work in flight of all layers."""
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, at most all of them, and wait for work in flight first.

        It also undoes an interrupted forward; `crop(0)` does nothing else.

        Args:
            tokens_to_remove: 0 or less.

        Raises:
            TypeError: not a whole number.
            ValueError: a positive number.
            RuntimeError: a sliding-window layer is past its window and does not record the tokens that left it; or
                another thread uses the cache.
        """
        try:
            tokens = operator.index(tokens_to_remove)  # a tensor of one whole number, too
        except (TypeError, ValueError):
            raise TypeError(f"crop({tokens_to_remove!r}): use a whole number, -n to drop n tokens") from None
        with self.alone():
            lengths = [layer.past for layer in hybrid_layers(self)] or [self.get_seq_length()]
            tokens = max(tokens, -max(lengths))
            self.transaction.crop(tokens, max(min(lengths) + tokens, 0))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search; rows share host blocks by reference.

        Args:
            beam_idx: int64 or int32 `[rows]`, the old row of each new one.

        Raises:
            IndexError, TypeError, ValueError: as `batch_select_indices`; a mask is a TypeError.
        """
        with self.alone(), self._rows("reorder_cache()", beam_idx, (torch.int64, torch.int32)) as rows:
            super().reorder_cache(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies share host blocks.

        Raises:
            TypeError: not a whole number.
            ValueError: less than 1.
        """
        what = f"batch_repeat_interleave({shown(repeats)})"
        rows = self._row_count()
        most = MOST // max(rows, 1)
        if isinstance(repeats, int) and not 1 <= repeats <= most:
            raise ValueError(f"{what}: use a whole number from 1 to {most}")
        try:
            index = torch.arange(rows).repeat_interleave(repeats)
        except TypeError:
            raise TypeError(f"{what}: use a whole number") from None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            raise ValueError(f"{what}: use a whole number from 1 to {most}") from None
        with self.alone(), self._rows(what, index):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that an index names, and drop the others.

        Args:
            indices: int64 or int32 row numbers `[n]`, negative ones from the end; or a bool mask `[rows]`. A list or
                tuple will do.

        Raises:
            IndexError: a number beyond the rows.
            TypeError: neither row numbers nor a mask.
            ValueError: a mask of another length, an index of another shape than `[rows]`, or one that keeps no row.
        """
        with self.alone(), self._rows("batch_select_indices()", indices) as rows:
            super().batch_select_indices(rows)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the cache to oneself, as a whole forward left it and with no work in flight."""
        self.transaction.take()
        try:
            self.transaction.rollback()
            self.drain()
            yield
        finally:
            self.transaction.leave()

    @contextmanager
    def _rows(
        self, what: str, index: Any, dtypes: tuple[torch.dtype, ...] = (torch.int64, torch.int32, torch.bool)
    ) -> Iterator[torch.LongTensor]:
        """What is inside keeps the rows of an index in every layer; it gets their numbers `[rows]`, none negative.

        Raises:
            IndexError, TypeError, ValueError: as `batch_select_indices`; nothing has happened.
        """
        rows = _row_numbers(what, index, self._row_count(), dtypes)
        if self.graph is not None:
            self.graph.close()  # which holds what is resident now
        with self.transaction.changing_rows(what):
            yield rows
            self.settings.padding.select_rows(rows.numpy())

    def _row_count(self) -> int:
        """Rows of the cache; 0 if it is empty."""
        stock = [getattr(layer, "keys", None) for layer in self.layers]  # where no layer of ours is left
        return len(self.settings.padding.first) or next((len(keys) for keys in stock if keys is not None), 0)


def _row_numbers(what: str, index: Any, count: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    """The rows of an index, of `count` rows, as int64 `[rows]` on the CPU; of an empty cache, whatever was given."""
    try:
        rows = torch.as_tensor(range(count)[index] if isinstance(index, slice) else index).detach().cpu()
    except (TypeError, ValueError, RuntimeError):  # text, None, lists of unequal lengths
        raise TypeError(f"{what}: use row numbers or a bool mask, not {shown(index)}") from None
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
