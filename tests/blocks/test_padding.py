"""Validity of tokens, derived from masks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hf_offload.blocks.padding import Padding

SIZE = 8


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


def random_history(seed: int, paddings: list[Padding]) -> Iterator[np.ndarray]:
    """Masks that grow, change, end, and whose rows change place, told to several; the last one's lie elsewhere.

    Yields:
        What they must know after each step.
    """
    rng = np.random.default_rng(seed)
    batch, dense = int(rng.integers(1, 4)), False
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
        elif kind == "rows":
            rows = rng.integers(0, batch, batch)
            mask = mask[rows]
        else:  # a mask that was made from a dense one is forgotten
            mask = torch.cat([mask | dense, torch.ones(batch, 1, dtype=torch.bool)], 1)
        given = mask if rng.random() < 0.5 else mask.long()
        for padding in paddings:
            if kind == "ends":
                padding.truncate(mask.shape[1])
            elif kind == "rows":
                padding.select_rows(rows)
            told = given.as_subclass(Elsewhere) if padding is paddings[-1] else given
            padding.observe(None if kind == "no mask" else told, batch, mask.shape[1], dense=bool(step % 2))
        if kind in ("grows", "changes", "no mask"):
            dense = bool(step % 2)
        yield mask.numpy()


class Elsewhere(torch.Tensor):
    """A mask that says that it lies on a device: only what is new comes from there."""

    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(12))
def test_what_is_known_is_what_the_masks_said(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a mask on a device is compared there."""
    monkeypatch.setattr("hf_offload.blocks.padding.LONG", 0)
    looks, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda *both: looks.append(equal(*both)) or looks[-1])
    paddings = [Padding(SIZE), Padding(SIZE)]
    for mask in random_history(seed, paddings):
        filled = np.pad(mask, ((0, 0), (0, -mask.shape[1] % SIZE)), constant_values=True)
        holes = ~filled.reshape(len(mask), -1, SIZE).all(2)
        first = mask.argmax(1) * holes.any()
        for padding in paddings:
            assert padding.seen == mask.shape[1]
            assert np.array_equal(padding.valid[:, : padding.seen] != 0, mask)
            assert np.array_equal(padding.holes[:, : holes.shape[1]] != 0, holes)
            assert padding.ragged or not holes.any()
            assert np.array_equal(padding.first, first)
            for size in (SIZE, 2):
                low, high = padding.sinks(6, size)
                assert low.tolist() == [begin // size for begin in first]
                assert high.tolist() == [-(-(begin + 6) // size) for begin in first]
    assert any(looks)


def test_another_batch_is_refused() -> None:
    padding = Padding(8)
    padding.observe(None, 2, 4)
    with pytest.raises(ValueError, match="holds 2 rows, but 3 arrived"):
        padding.observe(None, 3, 2000)
