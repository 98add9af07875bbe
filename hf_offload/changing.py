"""What changes all layers of a cache at once: tokens are dropped, rows kept, reordered or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from hf_offload.attention.hooks import hybrid_layers
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.settings import Settings
from hf_offload.cache.turn import Turn


class Changing(Cache):
    """A cache that is changed as a whole or not at all, by one thread at a time."""

    settings: Settings
    _turn: Turn
    _undo_to: int | None
    """Tokens before the forward that is running; None between forwards."""

    def undo(self) -> None:
        """Forget the tokens of a forward that did not end."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait for the work in flight of all layers."""
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens; work in flight ends first.

        Raises:
            ValueError: the number is positive.
            RuntimeError: a sliding-window layer is past its window and does not record what it drops.
        """
        with self.alone():
            hybrid = hybrid_layers(self)
            past = min((layer.past for layer in hybrid), default=self.get_seq_length())
            for layer in hybrid:
                layer.prepare_crop(tokens_to_remove)
            self._undo_to = past + int(tokens_to_remove)  # from here on an interruption is made up for by going on
            stock: list[Any] = [layer for layer in self.layers if not isinstance(layer, HybridLayer)]
            try:
                for layer in stock:
                    layer.crop(tokens_to_remove)
            except Exception:  # they refuse
                self._undo_to = None
                raise
            for layer in hybrid:
                layer.crop(tokens_to_remove)
            self._undo_to = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search; host KV is shared by reference, not copied."""
        with self.alone(), self._rows("reorder_cache()", beam_idx):
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        rows = torch.arange(len(self.settings.padding.first)).repeat_interleave(repeats)
        with self.alone(), self._rows("batch_repeat_interleave()", rows):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of an index."""
        with self.alone(), self._rows("batch_select_indices()", indices):
            super().batch_select_indices(indices)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the cache to oneself, as a whole forward left it and with no work in flight."""
        self._turn.take()
        try:
            self.undo()
            self.drain()
            yield
        finally:
            self._turn.leave()

    @contextmanager
    def _rows(self, what: str, index: torch.Tensor) -> Iterator[None]:
        """What is inside keeps the rows of an index (numbers, or a bool mask) in every layer.

        Raises:
            IndexError: there are no such rows; nothing has happened.
        """
        rows = index.detach().cpu().numpy()
        rows, padding = np.flatnonzero(rows) if rows.dtype == bool else rows, self.settings.padding
        count = len(padding.first)
        if count and len(rows) and not -count <= rows.min() <= rows.max() < count:
            raise IndexError(f"{what}: the cache holds rows 0 to {count - 1}, not {rows.tolist()}")
        with self._turn.changing(what):
            yield
            padding.select_rows(rows)
