"""Device copies of the host's metadata, updated in place for captured steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_offload.blocks import device_mirror as mirroring
from hf_offload.blocks.device_mirror import DeviceMirror
from hf_offload.blocks.padding import Padding
from hf_offload.cpu.thread_pool import Worker
from hf_offload.gpu import streams

CPU = torch.device("cpu")


def test_caches_on_a_device_recall_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out 32 streams in turns; one more for each cache would soon be one that is being captured."""
    made: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            made.append(device)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    streams.stream_for.cache_clear()
    try:
        devices = [torch.device("cuda", index) for index in range(2)]
        found = {DeviceMirror(Padding(8), device, Worker()).stream for device in devices for _ in range(40)}
    finally:
        streams.stream_for.cache_clear()
    assert len(found) == 2
    assert made == devices


def test_streams_are_made_in_one_place() -> None:
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


def test_padding_is_there_once_it_is_needed() -> None:
    padding = Padding(8)
    mirror = DeviceMirror(padding, CPU, Worker())
    mask = torch.ones(2, 20, dtype=torch.bool)
    padding.observe(mask, 2, 20)
    assert mirror.valid() is None
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1, :9] = False
    padding.observe(mask, 2, 21)
    valid = mirror.valid()
    assert valid is not None
    assert torch.equal(valid[:, :21] != 0, mask)
    assert [bound.tolist() for bound in mirror.sinks(4)] == [[0, 1], [1, 2]]


def test_rows_that_change_place_are_seen() -> None:
    """Arrays that follow each other may lie at the same address: only a count of changes tells them apart."""
    padding = Padding(8)
    mirror = DeviceMirror(padding, CPU, Worker())
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, :9] = False
    padding.observe(mask, 2, 16)
    for _ in range(5):
        mask = mask.flip(0)
        padding.select_rows(np.array([1, 0]))
        valid = mirror.valid()
        assert valid is not None
        assert torch.equal(valid[:, :16] != 0, mask)


def test_new_tokens_alone_are_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    padding, sizes = Padding(8), list[int]()
    sending = mirroring.sent
    monkeypatch.setattr(mirroring, "sent", lambda array, *given: sizes.append(array.size) or sending(array, *given))
    mirror = DeviceMirror(padding, CPU, Worker())
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :9] = False
    padding.observe(mask, 2, 20)
    tensor = mirror.valid()
    assert tensor is not None
    whole = sizes[-1]
    for count in (1, 3):
        mask = torch.cat([mask, torch.tensor([[True], [False]]).expand(2, count)], 1)
        padding.observe(mask, 2, mask.shape[1])
        assert mirror.valid() is tensor
        assert sizes[-1] == 2 * count
        assert np.array_equal(tensor.numpy(), padding.valid)
    mask = mask.clone()
    mask[0, 2] = False
    padding.observe(mask, 2, mask.shape[1])
    assert mirror.valid() is tensor
    assert sizes[-1] == whole
    for _ in range(2):  # this mirror has missed the first of two changes
        mask = torch.cat([mask, mask[:, :1]], 1)
        padding.observe(mask, 2, mask.shape[1])
    assert mirror.valid() is tensor
    assert sizes[-1] == whole
    padding.truncate(11)
    assert mirror.valid() is tensor
    assert np.array_equal(tensor.numpy(), padding.valid)
