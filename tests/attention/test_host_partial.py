"""Pinned buffers of host partials."""

from __future__ import annotations

import pytest
import torch

from hf_offload.attention.host_partial import all_pinned


def test_a_buffer_of_no_entries_does_not_make_the_others_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is asked about addresses: an empty tensor has none, and is not pinned."""
    pageable = torch.zeros(2)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() not in (0, pageable.data_ptr()))
    assert all_pinned((torch.zeros(3), torch.zeros(1, 2, 0)))
    assert not all_pinned((torch.zeros(3), pageable))
