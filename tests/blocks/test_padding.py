"""Validity of tokens, derived from masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload.blocks.padding import Padding


def test_left_padding_marks_holes_and_first_tokens() -> None:
    padding = Padding(8)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :11] = False
    padding.observe(mask, 2, 20)
    assert padding.ragged
    assert padding.first.tolist() == [0, 11]
    assert padding.holes[:, :3].tolist() == [[0, 0, 0], [1, 1, 0]]
    assert [bound.tolist() for bound in padding.sinks(6)] == [[0, 1], [1, 3]]
    assert [bound.tolist() for bound in padding.sinks(6, 2)] == [[0, 5], [3, 9]]


def test_no_padding_costs_nothing() -> None:
    padding = Padding(8)
    padding.observe(torch.ones(1, 20, dtype=torch.bool), 1, 20)
    assert not padding.ragged
    padding.observe(None, 1, 21)
    assert padding.seen == 21
    assert padding.valid[0, :21].all()


def test_a_later_turn_with_padding_inside() -> None:
    padding = Padding(8)
    padding.observe(None, 2, 10)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 10:17] = False
    padding.observe(mask, 2, 30)
    assert padding.holes[:, :4].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert padding.first.tolist() == [0, 0]


def test_a_mask_that_changes_its_mind_is_believed() -> None:
    padding = Padding(8)
    padding.observe(None, 1, 16)
    mask = torch.ones(1, 17, dtype=torch.bool)
    mask[0, 3] = False
    padding.observe(mask, 1, 17)
    assert padding.valid[0, :5].tolist() == [1, 1, 1, 0, 1]
    assert padding.holes[0, 0] == 1


def test_the_same_mask_from_another_device_changes_nothing() -> None:
    """Hooks that align devices copy it for every layer; what mirrors it must not be sent anew each time."""
    padding = Padding(8)
    mask = torch.ones(1, 17, dtype=torch.bool)
    mask[0, :3] = False
    padding.observe(mask, 1, 17)
    version, revision = padding.version, padding.revision
    padding.observe(mask.clone(), 1, 17)
    assert (padding.version, padding.revision) == (version, revision)
    mask[0, 3] = False
    padding.observe(mask.clone(), 1, 17)
    assert padding.version > version
    assert padding.first.tolist() == [4]


def test_truncate_and_rows() -> None:
    padding = Padding(8)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :3] = False
    padding.observe(mask, 2, 20)
    padding.select_rows(np.array([1, 1, 0]))
    assert padding.first.tolist() == [3, 3, 0]
    padding.truncate(5)
    assert padding.seen == 5
    assert not padding.valid[:, 5:].any()
    padding.observe(None, 3, 9)
    assert padding.valid[0, :9].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]


def random_history(seed: int, paddings: list[Padding]) -> None:
    """Masks that grow, change, end, and whose rows change place, told to several; the last one's lie elsewhere."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 4))
    mask = torch.from_numpy(rng.random((batch, int(rng.integers(1, 40)))) > 0.1)
    for step in range(20):
        kind = "grows" if step == 0 else rng.choice(["grows", "grows", "changes", "ends", "rows", "no mask"])
        if kind == "grows":
            mask = torch.cat([mask, torch.from_numpy(rng.random((batch, int(rng.integers(1, 12)))) > 0.1)], 1)
        elif kind == "changes":
            mask = mask.clone()
            mask[rng.integers(batch), rng.integers(mask.shape[1])] ^= True
        elif kind == "ends":
            mask = mask[:, : int(rng.integers(1, mask.shape[1] + 1))]
        rows = rng.integers(0, batch, batch)
        given = mask if rng.random() < 0.5 else mask.long()
        for padding in paddings:
            if kind == "ends":
                padding.truncate(mask.shape[1])
            elif kind == "rows":
                padding.select_rows(rows)
            if kind == "no mask":
                padding.observe(None, batch, mask.shape[1] + 1, dense=bool(step % 2))
            else:
                told = given[rows] if kind == "rows" else given
                told = told.as_subclass(Elsewhere) if padding is paddings[-1] else told
                padding.observe(told, batch, mask.shape[1])
        mask = torch.from_numpy(paddings[0].valid[:, : paddings[0].seen] != 0)


class Elsewhere(torch.Tensor):
    """A mask that says that it lies on a device: only what is new comes from there."""

    device = torch.device("cuda")  # type: ignore[assignment]


class Whole(Padding):
    """Reads each mask from its begin."""

    def _looked_at(self, mask: torch.Tensor | None, total: int) -> int:
        return 0


@pytest.mark.parametrize("seed", range(20))
def test_a_mask_that_is_compared_where_it_lies_says_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_offload.blocks.padding.LONG", 0)
    looks, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda *both: looks.append(equal(*both)) or looks[-1])
    whole, here, there = Whole(8), Padding(8), Padding(8)
    random_history(seed, [whole, here, there])
    assert any(looks)
    for padding in (here, there):
        for name in ("valid", "holes", "first"):
            assert np.array_equal(getattr(padding, name), getattr(whole, name))
        for name in ("ragged", "seen", "revision", "version", "dense", "changed_block"):
            assert getattr(padding, name) == getattr(whole, name)


def test_another_batch_is_refused() -> None:
    padding = Padding(8)
    padding.observe(None, 2, 4)
    with pytest.raises(ValueError, match="holds 2 rows, but 3 arrived"):
        padding.observe(None, 3, 2000)
