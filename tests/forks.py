"""Forks of the test's process that can neither hang nor go on with the other tests."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable

PATIENCE = 300.0


def forked(act: Callable[[], object]) -> int:
    """Call `act` in a forked child, which exits with 0 if `act` returned, with 1 if it raised; return its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def in_fork(act: Callable[[], object], patience: float = PATIENCE) -> int:
    """Call `act` in a forked child; return the child's exit status.

    Raises:
        AssertionError: the child has not ended in `patience` seconds, and was killed.
    """
    return exit_status(forked(act), patience)


def exit_status(child: int, patience: float = PATIENCE) -> int:
    """Exit status of a child process, which has `patience` seconds to end."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the forked child had not ended after {patience} seconds")
