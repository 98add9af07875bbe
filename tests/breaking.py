"""Launches that fail to complete their tasks, for tests of errors."""

from __future__ import annotations

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
