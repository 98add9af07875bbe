"""Segments: what saves of one prefix share, and what they must not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import used_blocks
from tiny import ONE_MEMORY, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.files import segments
from hf_offload.model.hooks import hybrid_layers

SIZE = 16
KINDS: dict[str, dict[str, Any]] = {
    "model's dtype": ONE_MEMORY,
    "int8": {"host_dtype": "int8", **ONE_MEMORY},
    "two memories": {"tier": "split", "resident": 128},
}


class Family:
    """A saved cache of 320 tokens, and caches that descend from it."""

    def __init__(self, model: PreTrainedModel, folder: Path, policy: str = "full", tokens: int = 320, **knobs: Any):
        self.model, self.folder = model, folder
        self.parent = self.feed(HybridCache(model, policy, **{"block_size": SIZE, **ONE_MEMORY, **knobs}), tokens)
        self.saved = self.parent.save_segments(folder / "parent")

    def feed(self, cache: HybridCache, tokens: int, seed: int = 0) -> HybridCache:
        with torch.no_grad():
            self.model(prompt(1, tokens, seed=seed)[0], past_key_values=cache)
        return cache

    def child(self, tokens: int = 0, seed: int = 0, crop: int = 0) -> HybridCache:
        child = self.parent.fork()
        child.crop(crop)
        return self.feed(child, tokens, seed) if tokens else child

    def save(self, cache: HybridCache, name: str, like: HybridCache | None = None) -> list[segments.Segment]:
        """Save a cache; what it shares with another one (the parent) is linked."""
        stores = {layer.index: layer.store for layer in hybrid_layers(like or self.parent)}
        return cache.save_segments(self.folder / name, segments.held_by(self.saved, stores))

    def names(self, name: str) -> dict[str, int]:
        """Segments of a folder with the number of their names."""
        return {path.name: path.stat().st_nlink for path in (self.folder / name).glob("segment-*")}

    def loads(self, name: str, cache: HybridCache) -> HybridCache:
        """A folder loads as a cache that holds the same tokens and goes on alike."""
        loaded, ids = HybridCache.load(self.folder / name, self.model), prompt(1, 2, seed=7)[0]
        with torch.no_grad():
            assert torch.equal(*(self.model(ids, past_key_values=each.fork()).logits for each in (loaded, cache)))
        for x, y in zip(loaded, cache, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(x[:2], y[:2], strict=True))
        return loaded


@pytest.fixture
def family(model: PreTrainedModel, tmp_path: Path) -> Family:
    return Family(model, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_descendant_links_what_it_shares_and_loads_bit_for_bit(
    model: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    family = Family(model, tmp_path, tokens=300, **KINDS[kind])
    child = family.child(150, seed=1)
    saved = family.save(child, "child")
    (first,) = family.names("parent")
    assert family.names("child")[first] == 2
    assert len(family.names("child")) == 2
    family.loads("child", child)
    loaded, family.saved = HybridCache.load_segments(tmp_path / "child", model)
    assert [part.path for part in family.saved] == [part.path for part in saved]
    later = family.feed(loaded.fork(), 40, seed=2)
    family.save(later, "later", loaded)
    assert family.names("later")[first] == 3
    family.loads("later", later)


def test_a_segment_of_which_less_than_half_is_used_is_not_linked(family: Family) -> None:
    for keep, links in ((10, 2), (9, 1)):
        child = family.child(crop=keep * SIZE + 5 - 320)
        family.save(child, str(keep))
        assert [*family.names(str(keep)).values()] == [links]
        family.loads(str(keep), child)


def test_blocks_of_a_linked_segment_that_nobody_uses_are_free(family: Family) -> None:
    """They take new tokens in memory; the file stays as it is."""
    child = family.child(crop=-5 * SIZE - 3)
    family.save(child, "child")
    contents = {path: path.read_bytes() for path in (family.folder / "child").iterdir()}
    loaded = family.loads("child", child)
    pool = loaded.layers[0].store.pool
    assert (used_blocks(pool), pool.num_blocks) == (15, 21)
    family.feed(loaded, 4 * SIZE, seed=3)
    assert pool.num_blocks == 21  # the free ones were taken
    assert {path: path.read_bytes() for path in (family.folder / "child").iterdir()} == contents


def test_a_block_that_was_given_to_other_tokens_is_written_anew(family: Family) -> None:
    """The parent is gone, and its numbers of blocks serve again: what the child no longer holds is not shared."""
    child = family.child(crop=200 - 320)
    base = child.fork()
    family.parent.reset()
    family.feed(child, 320 - 200, seed=4)
    old = {int(i) for part in family.saved for i in part.blocks[0]}
    assert {int(i) for i in child.layers[0].store.table[0, 13:20]} & old  # they would be taken for the parent's
    family.save(child, "child", base)
    family.loads("child", child)


def test_many_segments_are_joined(family: Family) -> None:
    cache, most = family.parent, 0
    (first,) = family.names("parent")
    for turn in range(segments.MOST_SEGMENTS + 10):
        child = family.feed(cache.fork(), SIZE, seed=turn % 5)
        family.saved = family.save(child, str(turn), cache)
        cache, most = child, max(most, len(family.names(str(turn))))
        assert first in family.names(str(turn))  # the large one is never written again
    assert most == segments.MOST_SEGMENTS
    family.loads(str(turn), cache)


def test_a_segment_whose_folder_is_gone_is_found_beside_it(family: Family) -> None:
    (first,) = family.names("parent")
    family.save(family.child(20), "child")
    (family.folder / "parent").rename(family.folder.parent / "elsewhere")
    family.save(family.child(30), "other")
    assert family.names("other")[first] == 3
    for name in ("child", "other"):
        (family.folder / name / first).unlink()
    third = family.child(40)
    family.save(third, "third")
    assert set(family.names("third").values()) == {1}  # written again
    family.loads("third", third)


def test_where_links_fail_segments_are_copied(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "link", link)
    child = family.child(20)
    family.save(child, "child")
    (first,) = family.names("parent")
    assert family.names("child")[first] == 1
    family.loads("child", child)


def test_segments_without_digests_are_not_linked_by_a_cache_that_has_them(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """`scout`'s digests begin with enough tokens for statistics: here 16 (`settings.py`)."""
    family = Family(model, tmp_path, "scout", 15, budget=64, sinks=8, recent=8, block_size=8)
    child = family.child(40)
    family.save(child, "child")
    assert set(family.names("child").values()) == {1}
    family.loads("child", child)


def test_a_flipped_byte_of_any_piece_changes_the_checksum() -> None:
    data = torch.randint(0, 256, (3 * (1 << 18) + 77,), dtype=torch.uint8)
    whole = segments.checksum(data)
    for place in (0, 5, 1 << 18, (1 << 19) + 9, 3 << 18, len(data) - 1):
        data[place] ^= 16
        assert segments.checksum(data) != whole
        data[place] ^= 16
    assert segments.checksum(data) == whole
    assert segments.checksum(data[:-1]) != whole
