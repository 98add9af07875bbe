"""What the command line says to all parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """Options of the check; defaults as on the command line.

    Args:
        device: where tensors lie: "cuda" or "cpu".
        quick: tiny sizes, to see that everything runs.
        layers: decoder layers of the model.
        kv_gib: GiB of keys, values and digests that a decode row may keep on the device, or None: all that is free.
        contexts, batches: tokens, and rows decoded at once.
        rows: names of decode rows.
        budget: tokens that a sparse decode attends.
        replay: the numbers of the script by which all rows choose ("miss=0.1,drift=0.15"), or None: `decoding.FEW`.
        steps: decode steps that are timed.
        host_gib: GiB of host memory that a decode row may take, or None: four fifths of the machine's.
    """

    device: str = "cuda"
    quick: bool = False
    layers: int = 36
    kv_gib: float | None = None
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    budget: int = 2048
    replay: str | None = None
    steps: int = 32
    host_gib: float | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to wait for."""
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()
