"""Settings that all layers of a cache share, and the checks of their knobs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_offload.blocks.device_mirror import DeviceMirror
from hf_offload.blocks.host_format import FORMATS
from hf_offload.blocks.padding import Padding
from hf_offload.cache.checks import Checks
from hf_offload.cache.memory_budget import DeviceBudget
from hf_offload.cache.progress import PromptProgress
from hf_offload.cache.residence import Residence
from hf_offload.cache.rollback import Drafts
from hf_offload.cpu.thread_pool import Worker
from hf_offload.knobs import check_choice, check_count, shown
from hf_offload.policies.base import Policy

BLOCK_SIZES = (8, 16, 32, 64, 128)
AUTO = "auto"
"""What fits the machine: whether decode steps are captured, how much is resident."""


def check_block_size(block_size: object) -> None:
    """Check the knob `block_size`.

    Raises:
        ValueError: the value is not allowed.
    """
    if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ValueError(f"block_size={shown(block_size)} is not supported; use one of {sizes}")


def check_sizes(block_size: int, prefill_tile: object, host_dtype: object, cuda_graph: object = AUTO) -> None:
    """Check the knobs of storage, which do not depend on the policy.

    Raises:
        ValueError: a value is not allowed.
    """
    check_block_size(block_size)
    check_count("prefill_tile", prefill_tile, least=block_size, hint=" (a block)")
    if not (host_dtype is None or isinstance(host_dtype, str)) or host_dtype not in FORMATS:
        names = ", ".join(f'"{name}"' for name in FORMATS if name)
        raise ValueError(f"host_dtype={shown(host_dtype)} is not supported; use {names}, or None for the model's dtype")
    if cuda_graph != AUTO and not isinstance(cuda_graph, bool):
        raise ValueError(f'cuda_graph={shown(cuda_graph)} is not True, False or "{AUTO}"; use one of these')


def check_tier(tier: object) -> None:
    """Check the knob `tier`.

    Raises:
        ValueError: the value is not allowed.
    """
    check_choice("tier", tier, (None, "one", "split"))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings and objects that all layers of a cache share.

    Args:
        policy: the policy.
        tier: `"one"` (one memory), `"split"` (two), or None: split if the model is on a device.
        block_size: tokens in a block.
        resident: resident tokens for each row and KV head, a multiple of `block_size`; with `residence` the least.
        prefill_tile: cached tokens that a prompt or append attends at a time.
        worker: the thread pool.
        padding: validity of the cached tokens.
        host_dtype: format of older host blocks (`FORMATS`).
        mirrors: the `DeviceMirror`s by device.
        device_budget: gives the size of the resident sets in place of `resident`, or None.
        residence: decides how many blocks are resident, or None.
        drafts: state of draft tokens.
        progress: progress bar of prompts, or None.
        checks: when steps are checked against full attention, or None.
        scratch: memory that the steps of all layers use in turn, by name.
    """

    policy: Policy
    tier: str | None
    block_size: int
    resident: int
    prefill_tile: int
    worker: Worker
    padding: Padding
    host_dtype: str | None = None
    device_budget: DeviceBudget | None = None
    residence: Residence | None = None
    mirrors: dict[torch.device, DeviceMirror] = field(default_factory=dict)
    drafts: Drafts = field(default_factory=Drafts)
    progress: PromptProgress | None = None
    checks: Checks | None = None
    scratch: dict[str, np.ndarray] = field(default_factory=dict)

    def mirror(self, device: torch.device) -> DeviceMirror:
        """The `DeviceMirror` of a device, made at the first call."""
        if device not in self.mirrors:
            self.mirrors[device] = DeviceMirror(self.padding, device, self.worker)
        return self.mirrors[device]

    def buffer(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Uninitialised scratch of a shape and dtype; a later, larger one leaves the arrays that were given alone."""
        count, held = math.prod(shape), self.scratch.get(name)
        if held is None or held.size < count or held.dtype != dtype:
            held = self.scratch[name] = np.empty(count * 5 // 4, dtype)
        return held[:count].reshape(shape)
