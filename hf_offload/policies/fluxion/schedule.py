"""Who takes which task of a step, of the CPU's threads and the device: dealt out by their pace, or by fixed rules."""

from __future__ import annotations

import math

import numpy as np

from hf_offload.policies.fluxion.kernels.dealing import deal, new_hands, take

SCHEDULES = ("priority", "none", "uniform", "length")
"""How the CPU and the device may share the choice of the host's blocks and the attention to them."""
CPU, DEVICE = 0, 1
_KEPT = 0.7  # of what was known of a pace, when a step tells more
_FADING = 0.95  # a step without a task makes a side seem so much quicker, so that it is tried again


class Pace:
    """How long a worker of each side takes for what a task reads, as the steps so far have shown it."""

    def __init__(self) -> None:
        self._seconds: list[float | None] = [None, None]

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a thread of the CPU and of the device, for a byte of V(blk); a side of which nothing is known: alike."""
        cpu, device = self._seconds
        known = cpu or device or 1.0
        return cpu or known, device or known

    def learn(self, side: int, volume: float, seconds: float) -> None:
        """Take in a step.

        Args:
            side: `CPU` or `DEVICE`.
            volume: bytes of V(blk) of the tasks that it did.
            seconds: for which its workers were at them, all together.
        """
        before = self._seconds[side]
        if volume > 0 and seconds > 0:
            now = seconds / volume
            self._seconds[side] = now if before is None else _KEPT * before + (1 - _KEPT) * now
        elif before is not None:
            self._seconds[side] = _FADING * before


class Queue:
    """The tasks of a step for two sides: the CPU's threads, and one device that is fed by one thread.

    Each side has a list, whose largest task its next free worker takes (Fluxion, section 6.2). With `"priority"` a task
    is dealt to the worker that would end it first, by the pace of both sides, and who has nothing left takes the
    smallest of the other side's that would come too late there. The other schedules are those of section 8.3, and
    nobody takes what is the other side's: with `"none"` the CPU has all tasks, with `"uniform"` every other one is the
    device's, with `"length"` rows are dealt out so that both sides get equally many tokens.

    Args:
        most: how many tasks there can be.
        schedule: one of `SCHEDULES`.
        threads: of the CPU.

    Raises:
        ValueError: another schedule.
    """

    def __init__(self, most: int, schedule: str, threads: int = 1) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
        self.schedule, self.threads, self.pace = schedule, threads, Pace()
        self.hands = new_hands(most)
        """What a kernel takes tasks with too (`whole_tasks`)."""

    def fill(self, tasks: np.ndarray, lengths: np.ndarray, volumes: np.ndarray) -> None:
        """Have these tasks; nobody is taking any.

        Args:
            tasks: int32 `[n]`, different from each other, the largest first.
            lengths: `[n]`, of the row that each of them belongs to.
            volumes: float64 `[n]`, what each of them reads, more than 0.
        """
        hands = self.hands
        hands.counts.fill(0)
        hands.taken.fill(0)
        if self.schedule == "priority":
            thread, device = self.pace.seconds
            theirs = np.empty(len(tasks), np.uint8)
            deal(volumes, self.threads, thread, device, theirs)
            theirs = theirs.astype(bool)
            hands.seconds[:] = (thread, thread / self.threads), (device, device)
        else:
            theirs = _device_share(self.schedule, tasks, lengths)
            hands.seconds[:] = math.inf, 0.0
        for side, mine in ((CPU, ~theirs), (DEVICE, theirs)):
            count = int(mine.sum())
            hands.order[side, :count] = tasks[mine]
            np.cumsum(volumes[mine], out=hands.before[side, 1 : count + 1])
            hands.counts[side] = count

    def take(self, side: int) -> int | None:
        """The next task of a free worker of a side, which nobody else gets from now on; None: there is none."""
        task = take(self.hands, side)
        return task if task >= 0 else None

    @property
    def shares(self) -> list[int]:
        """How many tasks each side has been dealt."""
        found: list[int] = self.hands.counts.tolist()
        return found

    def close(self) -> None:
        """Let nobody take another task."""
        self.hands.counts.fill(0)


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
