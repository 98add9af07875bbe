"""Block pools and requests for kernel tests: several slabs, shuffled blocks, poisoned unused memory."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_offload.cpu.launch import Launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = {torch.float32: torch.float32, torch.float16: torch.int16, torch.bfloat16: torch.uint16}


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as the array that kernels take."""
    return tensor.view(_BITS[tensor.dtype]).numpy()


def run(launch: Launch, threads: int = 1) -> None:
    """Run a launch on this thread and on `threads - 1` others."""
    launch.open(threads)
    helpers = [threading.Thread(target=launch.take_part) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    launch.take_part()
    for helper in helpers:
        helper.join()
    launch.check()


@dataclass
class Case:
    """A filled pool with its tables; unused slots and invalid tokens are NaN in `slabs`, 0 in `clean`."""

    slabs: list[torch.Tensor]
    clean: torch.Tensor  # [P, Hkv, 2, block_size, D]
    block_ptr: np.ndarray[Any, Any]
    table: torch.Tensor
    valid: torch.Tensor
    holes: torch.Tensor
    length: int


def make_case(
    batch: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    padding: tuple[int, ...],
    scattered: float = 0.0,
) -> Case:
    """Build a pool in two slabs; row b has `padding[b]` invalid tokens at its left and a share of others anywhere."""
    logical = math.ceil(length / block_size)
    physical = batch * logical + 2
    table = torch.randperm(physical)[: batch * logical].view(batch, logical).int()
    valid = torch.zeros(batch, logical * block_size, dtype=torch.uint8)
    for b in range(batch):
        valid[b, padding[b] : length] = 1
    valid[torch.rand(valid.shape) < scattered] = 0
    filled = torch.arange(logical * block_size) < length
    holes = ((valid == 0) & filled).view(batch, logical, block_size).any(-1).to(torch.uint8)
    content = torch.randn(physical, kv_heads, 2, block_size, dim).to(dtype)
    used = torch.zeros(physical, block_size, dtype=torch.bool)
    used[table.long()] = valid.view(batch, logical, block_size).bool()
    keep = used[:, None, None, :, None]
    poisoned = torch.where(keep, content, torch.tensor(math.nan, dtype=dtype))
    half = physical // 2
    slabs = [poisoned[:half].clone(), poisoned[half:].clone()]
    record = slabs[0][0].nbytes
    block_ptr = np.array([slab.data_ptr() + i * record for slab in slabs for i in range(len(slab))], np.int64)
    valid[:, length:] = 1  # beyond the length nothing may depend on it
    return Case(slabs, torch.where(keep, content, torch.zeros((), dtype=dtype)), block_ptr, table, valid, holes, length)
