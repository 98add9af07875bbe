"""Launches that fail where nobody looks at them: in the thread that makes what was posted."""

from __future__ import annotations

from typing import Any

from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.standing import Standing
from hf_offload.cpu.together import Row
from hf_offload.cpu.worker import Job, Worker

POST = Worker.post


@kernel
def _die(ticket: Array, tasks: int) -> None:
    raise ArithmeticError("the kernel died")


def dying(label: str) -> Standing:
    """A launch that raises ArithmeticError."""
    return Standing(Launch(_die, 1, (), 0), label)


def broken_post(worker: Worker, row: Row, launches: tuple[Standing, ...], numbers: Any, label: str, keep: Any) -> Job:
    """`Worker.post`, with a launch before the others that dies."""
    return POST(worker, Row(len(launches) + 1), (dying(label), *launches), numbers, label, keep)
