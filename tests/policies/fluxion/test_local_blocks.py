"""`LocalBlocks`: sinks and newest blocks of rows with different starts, recomputed only after a change."""

from __future__ import annotations

import numpy as np

from hf_offload.policies.base import Selection
from hf_offload.policies.fluxion.step import LocalBlocks


def lists(selection: Selection) -> list[list[int]]:
    found = []
    for blocks, counts in zip(selection.items, selection.counts, strict=True):
        assert (blocks == blocks[:1]).all()
        assert (counts == counts[:1]).all()
        assert blocks.max() < 12  # what is behind a count is a block, too
        found.append(blocks[0, : counts[0]].tolist())
    return found


def test_rows_have_their_own_sinks_and_share_no_block() -> None:
    # A row without padding, one whose sinks reach into the newest blocks, one that begins behind the host's end.
    sinks = np.array([0, 7, 10], np.int32), np.array([2, 9, 12], np.int32)
    first, newest = LocalBlocks(8).parts(sinks, 8, 12, kv_heads=3)
    assert first.items.shape[:2] == newest.counts.shape == (3, 3)
    assert lists(first) == [[0, 1], [7], []]
    assert lists(newest) == [[8, 9, 10, 11], [8, 9, 10, 11], [10, 11]]


def test_they_are_made_anew_when_something_has_changed() -> None:
    made = []

    def convert(selection: Selection) -> Selection:
        made.append(selection)
        return selection

    near, sinks = LocalBlocks(8, convert), (np.zeros(1, np.int32), np.full(1, 2, np.int32))
    known = near.parts(sinks, 8, 12, 2)
    assert near.parts(sinks, 8, 12, 2) is known
    assert len(made) == 2
    for end, blocks, heads in ((9, 12, 2), (9, 13, 2), (9, 13, 4)):
        assert near.parts(sinks, end, blocks, heads) is not known
        known = near.parts(sinks, end, blocks, heads)
    other = tuple(part.copy() for part in sinks)
    assert near.parts((other[0], other[1]), 9, 13, 4) is not known
    assert len(made) == 10
