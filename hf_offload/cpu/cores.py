"""How many CPU cores a process may use, beside the others that a launcher has started on the same machine."""

from __future__ import annotations

import os
from typing import Any

from ..knobs import check_count

LOCAL_RANKS = "LOCAL_WORLD_SIZE"
"""Environment variable in which torchrun (and accelerate with it) tells how many processes it runs on this machine."""


def cores() -> int:
    """Cores for this process: those that it may run on, divided among the launcher's processes here.

    A launcher may have bound each process to cores of its own. So it is what the launcher itself may use that is
    divided, and a process never counts more than it is bound to.

    Raises:
        ValueError: the launcher's variable holds no number of processes.
    """
    own = _allowed(0)
    told = os.environ.get(LOCAL_RANKS) or "1"
    ranks: Any = int(told) if told.isdecimal() and len(told) < 10 else told
    check_count(LOCAL_RANKS, ranks, what="a number of processes", hint=", or unset it where no launcher is")
    if ranks == 1:
        return own
    return max(min(own, max(own, _allowed(os.getppid())) // int(ranks)), 1)


def _allowed(process: int) -> int:
    """Cores that a process (0: this one) may run on; all of the machine's where the system does not say."""
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # another system, or a process that is gone
        return os.cpu_count() or 2
