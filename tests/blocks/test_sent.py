"""Copies of host arrays to the device: contents at the time of the call, in place for held tensors."""

from __future__ import annotations

import numpy as np
import pretended
import pytest
import torch

from hf_offload.blocks.device_mirror import sent


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
