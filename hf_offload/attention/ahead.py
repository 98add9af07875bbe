"""What the worker does for a layer's attention one layer early."""

from __future__ import annotations

from contextlib import suppress

from hf_offload.attention.host_kernels import HostKernels
from hf_offload.cache.stats import LayerStats
from hf_offload.cpu.early import take_in
from hf_offload.cpu.worker import Job, WorkerError
from hf_offload.policies.base import Selection


class Early:
    """What was begun one layer early with a predicted query.

    Args:
        chosen: chooses blocks; None: they are chosen.
    """

    def __init__(self, chosen: Job | None) -> None:
        self.chosen = chosen

    def wait_chosen(self, stats: LayerStats) -> None:
        """Wait until blocks are chosen, and count the time.

        Raises:
            WorkerError: that failed.
        """
        if self.chosen is not None:
            _wait(self.chosen, stats)

    def cancel(self) -> None:
        """Let all of it end, whatever comes of it, so that nothing reads what is about to change."""
        if self.chosen is not None:
            with suppress(WorkerError):  # nobody asks for this result any more
                self.chosen.result()


class Ahead(Early):
    """A CPU part that was started one layer early with a predicted query.

    Args:
        kernels: hold the predicted query, and the buffers that the part fills.
        host: the blocks that it attends.
        scale: softmax scale.
        correct: whether the result is corrected to the real query.
        chosen: chooses these blocks; None: they are chosen.
        job: attends them.
    """

    def __init__(
        self, kernels: HostKernels, host: Selection, scale: float, correct: bool, chosen: Job | None, job: Job
    ) -> None:
        super().__init__(chosen)
        self.kernels, self.host, self.scale, self.correct, self.job = kernels, host, scale, correct, job

    def wait(self, stats: LayerStats) -> None:
        """Wait for the part, and count the time.

        Raises:
            WorkerError: it failed.
        """
        _wait(self.job, stats)

    def take_part(self, real: HostKernels, stats: LayerStats) -> None:
        """Wait for the part, and take it into what the real query attended.

        Raises:
            WorkerError: it failed.
        """
        self.wait(stats)
        stats.query_cosine += self.join(real)
        stats.queries += 1

    def cancel(self) -> None:
        super().cancel()
        with suppress(WorkerError):
            self.job.result()

    def join(self, real: HostKernels) -> float:
        """Take the part, once it has ended, into what the real query attended; the mean cosine of the two queries."""
        mine = self.kernels
        return take_in(
            real.query, real.out, real.lse, mine.query, mine.out, mine.lse, mine.kbar, self.correct, self.scale
        )


def _wait(job: Job, stats: LayerStats) -> None:
    if not job.done():
        with stats.waiting():
            job.result()
    job.result()
