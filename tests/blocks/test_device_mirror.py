"""Device copies of the host's metadata, updated in place for captured steps."""

from __future__ import annotations

import numpy as np
import pretended
import pytest
import torch

from hf_offload.blocks.device_mirror import DeviceMirror, sent
from hf_offload.blocks.padding import Padding
from hf_offload.cpu.thread_pool import Worker

from .test_padding import random_history


@pytest.mark.parametrize("seed", range(12))
def test_padding_is_mirrored_whatever_becomes_of_it(seed: int) -> None:
    """Arrays that follow each other may lie at the same address: only a count of changes tells them apart."""
    padding, dice = Padding(8), np.random.default_rng(seed)
    mirror = DeviceMirror(padding, torch.device("cpu"), Worker())
    for mask in random_history(seed, [padding, Padding(8)]):
        if dice.random() < 0.8:
            valid = mirror.valid()
            assert valid is not None or mask.all()
            assert valid is None or np.array_equal(valid.numpy(), padding.valid)
            assert [bound.tolist() for bound in mirror.sinks(4)] == [bound.tolist() for bound in padding.sinks(4)]


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
