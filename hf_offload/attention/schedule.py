"""Who takes which task of a step: one queue for the CPU's threads and the device, or a list for each of them."""

from __future__ import annotations

import numpy as np

from hf_offload.cpu.launch import new_ticket
from hf_offload.cpu.tasks import take
from hf_offload.policies.base import SCHEDULES


class Tasks:
    """A list of tasks, taken from its beginning by any number of threads, each task once.

    Args:
        most: how many tasks there can be.
    """

    def __init__(self, most: int) -> None:
        self.order, self.count = np.zeros(most, np.int32), 0
        self.ticket = new_ticket()
        """What a kernel takes tasks with too (`cpu.tasks.whole_tasks`)."""

    def fill(self, tasks: np.ndarray) -> None:
        """Have these tasks, int32 `[n]`; nobody is taking any."""
        self.count = len(tasks)
        self.order[: self.count] = tasks
        self.ticket[:2] = 0

    def take(self) -> int | None:
        """The next task, which nobody else gets from now on; None: there is none."""
        place = take(self.ticket)
        return int(self.order[place]) if place < self.count else None

    def close(self) -> None:
        """Let nobody take another task."""
        self.ticket[0] = self.count


class Queue:
    """The tasks of a step for two sides: the CPU's threads, and one device that is fed by one thread.

    With `"priority"` both take from one list, each whenever it is free (Fluxion, section 6.2). The other schedules give
    each side a list of its own before anyone begins, those of section 8.3: with `"none"` the CPU has all tasks, with
    `"uniform"` every other one is the device's, with `"length"` rows are dealt out so that both sides get equally many
    tokens.

    Args:
        most: how many tasks there can be.
        schedule: one of `SCHEDULES`.

    Raises:
        ValueError: another schedule.
    """

    def __init__(self, most: int, schedule: str) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
        self.schedule = schedule
        self.cpu = Tasks(most)
        self.device = self.cpu if schedule == "priority" else Tasks(most)

    def fill(self, tasks: np.ndarray, lengths: np.ndarray) -> None:
        """Have these tasks; nobody is taking any.

        Args:
            tasks: int32 `[n]`, different from each other, the largest first.
            lengths: `[n]`, of the row that each of them belongs to.
        """
        if self.device is self.cpu:
            self.cpu.fill(tasks)
            return
        theirs = _device_share(self.schedule, tasks, lengths)
        self.cpu.fill(tasks[~theirs])
        self.device.fill(tasks[theirs])

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return self.cpu.count if self.device is self.cpu else self.cpu.count + self.device.count

    def close(self) -> None:
        """Let nobody take another task."""
        self.cpu.close()
        self.device.close()


def _device_share(schedule: str, tasks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which tasks are the device's, bool `[n]`, by a schedule that is settled beforehand."""
    theirs = np.zeros(len(tasks), bool)
    if schedule == "uniform":
        theirs[np.argsort(tasks, kind="stable")[1::2]] = True
    elif schedule == "length":
        loads = [0, 0]
        for place in np.argsort(-lengths, kind="stable").tolist():
            side = int(loads[1] < loads[0])
            theirs[place] = side == 1
            loads[side] += int(lengths[place])
    return theirs
