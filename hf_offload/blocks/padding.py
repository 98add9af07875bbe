"""`Padding`: the validity of cached tokens, one bitmap for all layers, read from the attention masks."""

from __future__ import annotations

import numpy as np
import torch

LONG = 1 << 16
"""Masks of this many tokens (all rows together) are compared with the previous mask on the device."""


class Padding:
    """Validity of every cached token of every row.

    The layers of a cache see the same mask in a forward; the first that observes it updates the bitmap, the others find
    it unchanged. Without padding `ragged` is False, and kernels skip the bitmap.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.revision = self.version = 0
        """Incremented whenever the validity of earlier tokens changes; not by `reset`, after which there are none."""
        self.reset()

    def reset(self) -> None:
        """Forget every row."""
        self.ragged = False
        self.seen = 0
        self.valid = np.zeros((0, 0), np.uint8)
        self.holes = np.zeros((0, 0), np.uint8)
        self.first = np.zeros(0, np.int32)
        self._mask: torch.Tensor | None = None
        self._copy: tuple[int, torch.Tensor] | None = None
        """A copy of the last long mask on a device, with the `version` that it belongs to."""
        self.dense = False
        self._sinks: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.version += 1
        """Incremented on every change."""
        self.changed_block = 0
        """The first block that the last `revision` changed."""
        self.grown: tuple[int, int] | None = None
        """If the last change only added tokens: the previous `version` and the number of tokens then; else None."""

    def on(self, device: torch.device, tokens: int) -> torch.Tensor:
        """Return whether each of the first `tokens` tokens is valid, bool `[B, tokens]` on a device."""
        return torch.from_numpy(self.valid[:, :tokens] != 0).to(device)

    def sinks(self, tokens: int, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """First block and end of the blocks with the first `tokens` valid tokens of each row, int32 `[B]` each.

        Args:
            tokens: number of tokens.
            size: of a block; None: the cache's. With 2 blocks are pairs.
        """
        size = size or self.block_size
        sinks = self._sinks.get((tokens, size))
        if sinks is None:
            low, high = self.first // size, -(-(self.first + tokens) // size)
            sinks = self._sinks[tokens, size] = low.astype(np.int32), high.astype(np.int32)
        return sinks

    def observe(self, mask: torch.Tensor | None, batch: int, total: int, *, dense: bool = False) -> None:
        """Update the validity of tokens 0..total-1 from a mask.

        Args:
            mask: `[B, total or more]` bool (or 0/1), True: may be attended; None: every new token may.
            batch: rows.
            total: cached tokens, including the new ones.
            dense: whether the mask was made from a dense mask, which holds for this forward alone.
        """
        if total == self.seen and (mask is None or mask is self._mask) and len(self.first) == batch:
            return
        self._reserve(batch, total)
        same = self._looked_at(mask, total)
        if mask is None:
            new = np.ones((batch, total - same), np.uint8)
            if not self.dense:
                new[:, : self.seen - same] = self.valid[:, same : self.seen]
        else:
            new = mask[:, same:total].detach().to("cpu", torch.uint8).numpy()
        differs = (new[:, : self.seen - same] != self.valid[:, same : self.seen]).any(0)
        self._mask = mask
        if total > self.seen or differs.any():  # otherwise the same mask, on another device
            start, self.grown = self.seen // self.block_size, (self.version, self.seen)
            if differs.any():
                start, self.grown = (same + int(differs.argmax())) // self.block_size, None
                self.changed_block = start
                self.revision += 1
                self.valid = self.valid.copy()  # work in flight keeps reading the old array
            self.valid[:, same:total] = new
            self._mark_holes(start, total)
            self.seen, self.dense = total, dense
            self.version += 1
        if self._copy is not None:
            self._copy = self.version, self._copy[1]

    def _looked_at(self, mask: torch.Tensor | None, total: int) -> int:
        """The number of tokens that need no comparison: `seen` if the mask has not changed there, else 0."""
        before, self._copy = self._copy, None
        if mask is None:
            return 0 if self.dense else self.seen
        same = self._same_on_host(mask) if mask.device.type == "cpu" else self._same_on_device(mask, total, before)
        return self.seen if same else 0

    def _same_on_host(self, mask: torch.Tensor) -> bool:
        given = mask.detach()
        given = given.view(torch.uint8) if given.dtype == torch.bool else given.to(torch.uint8)
        return np.array_equal(given[:, : self.seen].numpy(), self.valid[:, : self.seen])

    def _same_on_device(self, mask: torch.Tensor, total: int, before: tuple[int, torch.Tensor] | None) -> bool:
        """Compare a long mask on its device, which is faster than copying it to the host."""
        if len(mask) * total < LONG:
            return False
        now = mask[:, :total].to(torch.bool, copy=True)  # a copy: the caller may overwrite the mask
        self._copy = self.version, now
        if before is None or before[0] != self.version or before[1].device != now.device:
            return False
        return torch.equal(before[1][:, : self.seen], now[:, : self.seen])

    def _reserve(self, batch: int, total: int) -> None:
        if len(self.first) == batch and self.valid.shape[1] > total:  # look-ahead reads the next token
            return
        if len(self.first) not in (0, batch):
            raise ValueError(
                f"the cache holds {len(self.first)} rows, but {batch} arrived; call reset() for another batch"
            )
        blocks = -(-max(total + 1, 2 * self.valid.shape[1], 1024) // self.block_size)
        valid = np.zeros((batch, blocks * self.block_size), np.uint8)
        holes = np.zeros((batch, blocks), np.uint8)
        if len(self.first):
            valid[:, : self.valid.shape[1]] = self.valid
            holes[:, : self.holes.shape[1]] = self.holes
        self.valid, self.holes = valid, holes
        if len(self.first) != batch:
            self.first, self._sinks = np.zeros(batch, np.int32), {}

    def _mark_holes(self, first_block: int, total: int) -> None:
        size, last = self.block_size, -(-total // self.block_size)
        filled = self.valid[:, first_block * size : last * size].reshape(len(self.first), -1, size).copy()
        if last * size > total:
            filled[:, -1, total - last * size :] = 1  # unfilled is not a hole
        holes = (filled == 0).any(-1)
        if (self.holes[:, first_block:last] != holes).any():
            self.holes = self.holes.copy()  # as in `observe`
            self.holes[:, first_block:last] = holes
        self.ragged = bool(self.holes[:, :last].any())
        if first_block * size > self.first.max(initial=0) and self.valid[np.arange(len(self.first)), self.first].all():
            return  # every row's first valid token is known and before the change
        first = np.zeros_like(self.first)
        if self.ragged:
            first = (self.valid[:, :total] != 0).argmax(1).astype(np.int32)
        if not np.array_equal(first, self.first):
            self.first, self._sinks = first, {}

    def copy_from(self, valid: np.ndarray, *, dense: bool) -> None:
        """Fill an empty object from another one.

        Args:
            valid: `[B, T]` uint8, the validity of the tokens seen.
            dense: whether it was made from a dense mask.
        """
        batch, total = valid.shape
        if total:
            self.observe(torch.from_numpy(valid), batch, total, dense=dense)
            self._mask = None

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.seen, self._mask, self.grown = min(self.seen, length), None, None
        if self.seen == 0:
            self.reset()
            return
        self.version += 1
        self.valid[:, self.seen :] = 0
        self._mark_holes(self.seen // self.block_size, self.seen)

    def look_again(self) -> None:
        """Recompute what is derived from the bitmap, if any token is invalid."""
        if self.ragged or not self.valid[:, : self.seen].all():
            self._mark_holes(0, self.seen)
            self.changed_block, self.grown = 0, None
            self.revision += 1
            self.version += 1

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index `[B']`, in its order."""
        if len(self.first):
            self.valid, self.holes, self.first = self.valid[rows], self.holes[rows], self.first[rows]
            self._mask, self._sinks, self.grown = None, {}, None
            self.version += 1
