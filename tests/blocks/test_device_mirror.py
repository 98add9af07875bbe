"""Device copies of the host's metadata, updated in place for captured steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pretended
import pytest
import torch

from hf_offload.blocks import device_mirror
from hf_offload.blocks.device_mirror import DeviceMirror, sent
from hf_offload.blocks.padding import Padding
from hf_offload.cpu.thread_pool import Worker
from hf_offload.gpu import streams

from .test_padding import random_history

CPU = torch.device("cpu")


def test_streams_are_made_in_one_place() -> None:
    """torch hands out 32 in turns; one more for each cache would soon be one that is being captured."""
    package = Path(streams.__file__).parents[1]
    makers = [path.name for path in package.rglob("*.py") if "torch.cuda.Stream(" in path.read_text(encoding="utf-8")]
    assert makers == ["streams.py"]


def test_sizes_change_in_place() -> None:
    mirror = DeviceMirror(Padding(8), CPU, Worker())
    first = mirror.limits("step", 20, 2)
    assert first.tolist() == [20, 2]
    assert mirror.limits("ahead", 19, 2) is not first
    assert mirror.limits("step", 21, 2) is first
    assert first.tolist() == [21, 2]


class Mirrored(Padding):
    """Is compared with its mirror whenever it was told something, or now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(8)
        self.mirror, self.dice = DeviceMirror(self, CPU, Worker()), np.random.default_rng(seed)

    def observe(self, mask: torch.Tensor | None, batch: int, total: int, *, dense: bool = False) -> None:
        super().observe(mask, batch, total, dense=dense)
        if self.dice.random() < 0.8:
            valid = self.mirror.valid()
            assert valid is not None or not self.ragged
            assert valid is None or np.array_equal(valid.numpy(), self.valid)
            wanted = [bound.tolist() for bound in self.sinks(4)]
            assert [bound.tolist() for bound in self.mirror.sinks(4)] == wanted


@pytest.mark.parametrize("seed", range(20))
def test_padding_is_mirrored_whatever_becomes_of_it(seed: int) -> None:
    """Arrays that follow each other may lie at the same address: only a count of changes tells them apart."""
    random_history(seed, [Mirrored(seed), Padding(8)])


def test_new_tokens_alone_are_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    padding, sizes = Padding(8), list[int]()
    monkeypatch.setattr(device_mirror, "sent", lambda array, *given: sizes.append(array.size) or sent(array, *given))
    mirror, mask = DeviceMirror(padding, CPU, Worker()), torch.ones(2, 20, dtype=torch.bool)
    mask[1, :9] = False
    padding.observe(mask, 2, 20)
    tensor, whole = mirror.valid(), sizes[-1]
    for count in (1, 3):
        mask = torch.cat([mask, torch.tensor([[True], [False]]).expand(2, count)], 1)
        padding.observe(mask, 2, mask.shape[1])
        assert mirror.valid() is tensor
        assert sizes[-1] == 2 * count
    for _ in range(2):  # this mirror has missed the first of two changes
        mask = torch.cat([mask, mask[:, :1]], 1)
        padding.observe(mask, 2, mask.shape[1])
    assert mirror.valid() is tensor
    assert sizes[-1] == whole


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_array_may_change_as_soon_as_it_is_sent(device: str) -> None:
    where, array = torch.device(device), np.arange(60, dtype=np.int32).reshape(4, 15)
    first = sent(array[:, ::2], where)  # any layout
    want = array[:, ::2].copy()
    if device == "cuda":
        torch.cuda._sleep(100_000_000)
    assert sent(array[:, ::2] + 1, where, first) is first
    kept = first.clone()
    again = sent(array, where, first)
    array[:] = -1
    if device == "cuda":
        assert not (pretended.LAGS and torch.cuda.current_stream().query())
    assert torch.equal(kept.cpu(), torch.from_numpy(want + 1))
    assert again is not first
    assert torch.equal(again.cpu(), torch.arange(60, dtype=torch.int32).view(4, 15))
