"""Validity of tokens, learnt from masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload.cache.padding import Padding


def test_left_padding_marks_holes_and_first_tokens() -> None:
    padding = Padding(8)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :11] = False
    padding.observe(mask, 2, 20)
    assert padding.ragged
    assert padding.first.tolist() == [0, 11]
    assert padding.holes[:, :3].tolist() == [[0, 0, 0], [1, 1, 0]]


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


def test_another_batch_is_refused() -> None:
    padding = Padding(8)
    padding.observe(None, 2, 4)
    with pytest.raises(ValueError, match="holds 2 rows, but 3 arrived"):
        padding.observe(None, 3, 2000)
