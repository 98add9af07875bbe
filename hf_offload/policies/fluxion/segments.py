"""A layer's tokens by where they are attended, for whoever learns from them when decoding starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


Piece = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys and values `[B, Hkv, T, D]` and which of the tokens count, bool `[B, T]`."""


class Segments(NamedTuple):
    """The tokens before a step's own.

    Args:
        sinks, newest: what is always attended.
        far: the tokens in between, in tiles of whole blocks, read when they are asked for.
        scores: fp32 `[B, Hq, n]`, log masses of the blocks in between for a query, by their digests.
    """

    sinks: Piece
    newest: Piece
    far: Iterator[Piece]
    scores: torch.Tensor


def segments_of(step: Step, query: torch.Tensor) -> Segments:
    """The segments of the tokens before a step's own, of which there are some between the local ones.

    Args:
        step: of a layer; what only the device holds is written to the host.
        query: `[B, Hq, D]` fp32, that blocks are scored with.
    """
    step.begin()
    layer, length, end, scores = step.layer, step.length - 1, step.host_end, step.scores
    layer.write_back()
    store, size, tile = layer.store, layer.settings.block_size, layer.settings.prefill_tile
    assert store is not None
    padding, digests = store.padding, store.digests
    assert digests is not None, "a policy without a digest has no scores"
    behind = torch.from_numpy(padding.sinks(layer.requirements.sinks)[1]).long().clamp(max=end) * size  # [B]
    begin, stop = int(behind.min()), end * size

    def piece(first: int, last: int, sinks: bool | None) -> Piece:
        key, value = store.gather(first, last - first)
        valid = torch.from_numpy(padding.valid[:, first:last] != 0)
        if sinks is not None:
            valid &= (torch.arange(first, last) < behind[:, None]) == sinks
        return key, value, valid.to(key.device)

    stride = max(tile // size, 1) * size
    far = (piece(first, min(first + stride, stop), False) for first in range(begin, stop, stride))
    limits = torch.tensor([stop, end], dtype=torch.int32, device=digests.device)
    table = torch.from_numpy(store.table[:, :end].copy()).to(digests.device)
    masses = digests.score(query.to(digests.device).contiguous(), table, limits, scores)
    masses = masses[:, :, begin // size :].to(query.device)
    return Segments(piece(0, int(behind.max()), True), piece(stop, length, None), far, masses)
