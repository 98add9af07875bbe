"""The part of a layer's attention that the CPU computes one layer early."""

from __future__ import annotations

from contextlib import suppress

from hf_offload.attention.host_kernels import HostKernels
from hf_offload.cpu.early import take_in
from hf_offload.cpu.worker import Job, WorkerError
from hf_offload.policies.base import Selection


class Ahead:
    """A CPU part that was started one layer early with a predicted query.

    Args:
        kernels: hold the predicted query, and the buffers that the part fills.
        host: the blocks that it attends.
        scale: softmax scale.
        correct: whether the result is corrected to the real query.
        job: computes it.
    """

    def __init__(self, kernels: HostKernels, host: Selection, scale: float, correct: bool, job: Job) -> None:
        self.kernels, self.host, self.scale, self.correct, self.job = kernels, host, scale, correct, job

    def wait(self) -> None:
        """Wait for the part.

        Raises:
            WorkerError: it failed.
        """
        self.job.result()

    def join(self, real: HostKernels) -> float:
        """Take the part, once it has ended, into what the real query attended; the mean cosine of the two queries."""
        mine = self.kernels
        return take_in(
            real.query, real.out, real.lse, mine.query, mine.out, mine.lse, mine.kbar, self.correct, self.scale
        )

    def cancel(self) -> None:
        """Let the job end, whatever comes of it, so that nothing reads blocks that are about to change."""
        with suppress(WorkerError):  # nobody asks for this result any more
            self.job.result()
