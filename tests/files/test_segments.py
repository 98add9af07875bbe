"""Segments: what saves of one prefix share, and what they must not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import used_blocks
from tiny import ONE_MEMORY, prompt, tiny_model
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


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def feed(model: PreTrainedModel, cache: HybridCache, tokens: int, seed: int = 0) -> HybridCache:
    with torch.no_grad():
        model(prompt(1, tokens, seed=seed)[0], past_key_values=cache)
    return cache


def make(model: PreTrainedModel, tokens: int, **knobs: Any) -> HybridCache:
    return feed(model, HybridCache(model, "full", block_size=SIZE, **{**ONE_MEMORY, **knobs}), tokens)


def shared(parent: HybridCache, saved: list[segments.Segment]) -> list[segments.Segment]:
    return segments.held_by(saved, {layer.index: layer.store for layer in hybrid_layers(parent)})


def names(folder: Path) -> dict[str, int]:
    """Segments of a folder with the number of their names."""
    return {path.name: path.stat().st_nlink for path in folder.glob("segment-*")}


def same(model: PreTrainedModel, one: HybridCache, other: HybridCache) -> bool:
    """Whether two caches hold the same tokens and go on alike."""
    ids = prompt(1, 3, seed=7)[0]
    with torch.no_grad():
        logits = [model(ids, past_key_values=cache.fork()).logits for cache in (one, other)]
    return torch.equal(*logits) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x[:2], y[:2], strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_descendant_links_what_it_shares_and_loads_bit_for_bit(
    model: PreTrainedModel, tmp_path: Path, kind: str
) -> None:
    parent = make(model, 300, **KINDS[kind])
    saved = parent.save_segments(tmp_path / "parent")
    child = feed(model, parent.fork(), 150, seed=1)
    again = child.save_segments(tmp_path / "child", shared(parent, saved))
    (first,) = names(tmp_path / "parent")
    assert names(tmp_path / "child")[first] == 2
    assert len(names(tmp_path / "child")) == 2
    loaded, found = HybridCache.load_segments(tmp_path / "child", model)
    assert same(model, loaded, child)
    assert [part.path for part in found] == [part.path for part in again]
    later = feed(model, loaded.fork(), 40, seed=2)
    later.save_segments(tmp_path / "later", shared(loaded, found))
    assert names(tmp_path / "later")[first] == 3
    assert same(model, HybridCache.load(tmp_path / "later", model), later)


def test_a_segment_of_which_less_than_half_is_used_is_not_linked(model: PreTrainedModel, tmp_path: Path) -> None:
    parent = make(model, 320)
    saved = parent.save_segments(tmp_path / "parent")
    for keep, links in ((10, 2), (9, 1)):
        child = parent.fork()
        child.crop(keep * SIZE + 5 - 320)
        child.save_segments(tmp_path / str(keep), shared(parent, saved))
        (count,) = names(tmp_path / str(keep)).values()
        assert count == links
        loaded = HybridCache.load(tmp_path / str(keep), model)
        assert same(model, loaded, child)


def test_blocks_of_a_linked_segment_that_nobody_uses_are_free(model: PreTrainedModel, tmp_path: Path) -> None:
    """They take new tokens in memory; the file stays as it is."""
    parent = make(model, 320)
    saved = parent.save_segments(tmp_path / "parent")
    child = parent.fork()
    child.crop(-5 * SIZE - 3)
    child.save_segments(tmp_path / "child", shared(parent, saved))
    contents = {path: path.read_bytes() for path in (tmp_path / "child").iterdir()}
    loaded = HybridCache.load(tmp_path / "child", model)
    pool = loaded.layers[0].store.pool
    assert used_blocks(pool) == 15
    assert pool.num_blocks == 21
    for cache in (child, loaded):
        feed(model, cache, 4 * SIZE, seed=3)
    assert pool.num_blocks == 21  # the free ones were taken
    assert same(model, loaded, child)
    assert {path: path.read_bytes() for path in (tmp_path / "child").iterdir()} == contents


def test_a_block_that_was_given_to_other_tokens_is_written_anew(model: PreTrainedModel, tmp_path: Path) -> None:
    """The parent is gone, and its numbers of blocks serve again: what the child no longer holds is not shared."""
    parent = make(model, 320)
    saved = parent.save_segments(tmp_path / "parent")
    child = parent.fork()
    child.crop(200 - 320)
    base = child.fork()
    parent.reset()
    feed(model, child, 320 - 200, seed=4)
    old = {int(i) for part in saved for i in part.blocks[0]}
    new = {int(i) for i in child.layers[0].store.table[0, 13:20]}
    assert new & old  # without the base they would be taken for the parent's
    child.save_segments(tmp_path / "child", shared(base, saved))
    assert same(model, HybridCache.load(tmp_path / "child", model), child)


def test_many_segments_are_joined(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = make(model, 320)
    saved = cache.save_segments(tmp_path / "0")
    (first,) = names(tmp_path / "0")
    most = 0
    for turn in range(1, 60):
        child = feed(model, cache.fork(), SIZE, seed=turn % 5)
        saved = child.save_segments(tmp_path / str(turn), shared(cache, saved))
        cache = child
        most = max(most, len(names(tmp_path / str(turn))))
        assert first in names(tmp_path / str(turn))  # the large one is never written again
    assert most == segments.MOST_SEGMENTS
    assert same(model, HybridCache.load(tmp_path / "59", model), cache)


def test_a_segment_whose_folder_is_gone_is_found_beside_it(model: PreTrainedModel, tmp_path: Path) -> None:
    parent = make(model, 320)
    saved = parent.save_segments(tmp_path / "parent")
    (first,) = names(tmp_path / "parent")
    feed(model, parent.fork(), 20).save_segments(tmp_path / "child", shared(parent, saved))
    (tmp_path / "parent").rename(tmp_path.parent / "elsewhere")
    feed(model, parent.fork(), 30).save_segments(tmp_path / "other", shared(parent, saved))
    assert names(tmp_path / "other")[first] == 3
    for path in (tmp_path / "child" / first, tmp_path / "other" / first):
        path.unlink()
    third = feed(model, parent.fork(), 40)
    third.save_segments(tmp_path / "third", shared(parent, saved))
    assert set(names(tmp_path / "third").values()) == {1}  # written again
    assert same(model, HybridCache.load(tmp_path / "third", model), third)


def test_where_links_fail_segments_are_copied(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(os, "link", link)
    parent = make(model, 320)
    saved = parent.save_segments(tmp_path / "parent")
    child = feed(model, parent.fork(), 20)
    child.save_segments(tmp_path / "child", shared(parent, saved))
    (first,) = names(tmp_path / "parent")
    assert names(tmp_path / "child")[first] == 1
    assert same(model, HybridCache.load(tmp_path / "child", model), child)


def test_segments_without_digests_are_not_linked_by_a_cache_that_has_them(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """`scout`'s digests begin with enough tokens for statistics: here 16 (`conftest.py`)."""
    parent = HybridCache(model, "scout", budget=64, sinks=8, recent=8, block_size=8, **ONE_MEMORY)
    feed(model, parent, 15)
    saved = parent.save_segments(tmp_path / "parent")
    child = feed(model, parent.fork(), 40)
    child.save_segments(tmp_path / "child", shared(parent, saved))
    assert set(names(tmp_path / "child").values()) == {1}
    assert same(model, HybridCache.load(tmp_path / "child", model), child)


def test_a_flipped_byte_of_any_piece_changes_the_checksum() -> None:
    data = torch.randint(0, 256, (3 * (1 << 18) + 77,), dtype=torch.uint8)
    whole = segments.checksum(data)
    for place in (0, 5, 1 << 18, (1 << 19) + 9, 3 << 18, len(data) - 1):
        data[place] ^= 16
        assert segments.checksum(data) != whole
        data[place] ^= 16
    assert segments.checksum(data) == whole
    assert segments.checksum(data[:-1]) != whole
