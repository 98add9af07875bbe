"""The number of CPU cores for this process: its affinity mask, shared with the launcher's other processes."""

from __future__ import annotations

import os
from typing import Any

from ..knobs import check_count

LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""Environment variable in which torchrun (and accelerate through it) gives its number of processes on this machine."""


def cores() -> int:
    """Return the number of cores for this process: an equal share of the launcher's cores.

    The launcher may have bound each process to cores of its own. The function therefore divides the cores of the
    launcher (the parent process), and never returns more cores than this process is bound to.

    Raises:
        ValueError: `LOCAL_WORLD_SIZE` is not a number of processes.
    """
    own = _allowed(0)
    value = os.environ.get(LOCAL_RANKS) or "1"
    ranks: Any = int(value) if value.isdecimal() and len(value) < 10 else value
    check_count(LOCAL_RANKS, ranks, what="a number of processes", hint=", or unset it where no launcher is")
    if ranks == 1:
        return own
    return max(min(own, max(own, _allowed(os.getppid())) // int(ranks)), 1)


def _allowed(process: int) -> int:
    """Cores in the affinity mask of a process (0: this one); all cores of the machine where there is no such mask."""
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # not Linux, or the process has ended
        return os.cpu_count() or 2
