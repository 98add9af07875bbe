"""The part of a layer's attention that the CPU computes one layer early."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from hf_offload.cpu.worker import Job, WorkerError
from hf_offload.policies.base import Selection


class Ahead:
    """A CPU part that was started one layer early with a predicted query; it owns the buffers that it fills.

    Args:
        query: `[B, Hq, D]` fp32, the predicted query.
        host: the blocks that it attends.
        scale: softmax scale.
        correct: whether the result is corrected to the real query.
    """

    def __init__(self, query: np.ndarray, host: Selection, scale: float, correct: bool) -> None:
        self.query, self.host, self.scale = query, host, scale
        self.out, self.lse = np.empty_like(query), np.empty(query.shape[:2], np.float32)
        self.kbar = np.empty_like(query) if correct else None
        self.job: Job | None = None

    def partial(self, query: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the part; its lse corrected to first order in `query - self.query`: + scale·Δq·k̄."""
        assert self.job is not None
        self.job.result()
        lse = self.lse
        if self.kbar is not None:
            lse = lse + self.scale * ((query - self.query) * self.kbar).sum(-1)
        return torch.from_numpy(self.out), torch.from_numpy(lse)

    def cosine(self, query: np.ndarray) -> float:
        """Mean cosine between the predicted query and the real one."""
        norms = np.linalg.norm(self.query, axis=-1) * np.linalg.norm(query, axis=-1)
        return float(((self.query * query).sum(-1) / np.maximum(norms, 1e-12)).mean())

    def cancel(self) -> None:
        """Let the job end, whatever comes of it, so that nothing reads blocks that are about to change."""
        if self.job is not None:
            with suppress(WorkerError):  # nobody asks for this result any more
                self.job.result()
