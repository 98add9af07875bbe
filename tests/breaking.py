"""Faults for tests of errors: launches that leave tasks undone, Ctrl-C at a certain point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_offload.cpu.launch import Array, Launch, kernel

UNDONE = r"only 0 of 1 tasks were done"
"""What is said of such a launch."""


@kernel
def _die(ticket: Array, tasks: int) -> None:
    raise ArithmeticError("the kernel died")


def broken_launch(*args: Any, **kwargs: Any) -> Launch:
    """A launch whose kernel raises, in place of another one."""
    return Launch(_die, 1, (), 0)


@contextmanager
def interrupted_at(point: int, *places: str) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the n-th point in these files or folders where Python looks for signals.

    It looks when a function begins and when one of C's returns. What is given counts the points down.
    """
    left = [point]

    def look(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(places):
            left[0] -= 1
            if left[0] == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield left
    finally:
        sys.setprofile(None)
