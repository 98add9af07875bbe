"""The part of a layer's attention that the CPU computes one layer early."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from hf_offload.attention.host_kernels import HostKernels
from hf_offload.cpu.worker import Job, WorkerError
from hf_offload.policies.base import Selection


class Ahead:
    """A CPU part that was started one layer early with a predicted query.

    Args:
        kernels: hold the predicted query, and the buffers that the part fills.
        host: the blocks that it attends.
        scale: softmax scale.
        correct: whether the result is corrected to the real query.
    """

    def __init__(self, kernels: HostKernels, host: Selection, scale: float, correct: bool) -> None:
        self.kernels, self.host, self.scale, self.correct = kernels, host, scale, correct
        self.job: Job | None = None

    def partial(self, query: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the part; its lse corrected to first order in `query - self.query`: + scale·Δq·k̄."""
        assert self.job is not None
        self.job.result()
        lse = self.kernels.lse
        if self.correct:
            lse = lse + self.scale * ((query - self.kernels.query) * self.kernels.kbar).sum(-1)
        return self.kernels.out_tensor, torch.from_numpy(lse)

    def cosine(self, query: np.ndarray) -> float:
        """Mean cosine between the predicted query and the real one."""
        predicted = self.kernels.query
        norms = np.linalg.norm(predicted, axis=-1) * np.linalg.norm(query, axis=-1)
        return float(((predicted * query).sum(-1) / np.maximum(norms, 1e-12)).mean())

    def cancel(self) -> None:
        """Let the job end, whatever comes of it, so that nothing reads blocks that are about to change."""
        if self.job is not None:
            with suppress(WorkerError):  # nobody asks for this result any more
                self.job.result()
