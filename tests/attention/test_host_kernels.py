"""Buffers and launches that are used again from step to step: only while nobody else works in them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from hf_offload.attention.host_kernels import kernels_of
from hf_offload.cpu.worker import Worker


def test_buffers_of_a_job_that_was_given_up_are_left_to_it() -> None:
    layer: Any = SimpleNamespace(index=0, kernels={})
    first = kernels_of(layer, torch.Size((1, 4, 16)), ahead=True)
    assert kernels_of(layer, torch.Size((1, 4, 16)), ahead=True) is first
    assert kernels_of(layer, torch.Size((1, 4, 16)), ahead=False) is not first
    gate = threading.Event()
    first.job = Worker().submit(gate.wait)
    second = kernels_of(layer, torch.Size((1, 4, 16)), ahead=True)
    assert second is not first
    gate.set()
    second.lent = True
    third = kernels_of(layer, torch.Size((1, 4, 16)), ahead=True)
    assert third is not second
    assert kernels_of(layer, torch.Size((1, 4, 16)), ahead=True) is third
