"""Cases of a check that fail, crash and hang, for processes that import nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from gpu.supervise import NotApplicable, Report


def troubled(names: Sequence[str], report: Report) -> None:
    """Cases named for what becomes of them."""
    for name in names:
        with report.case(name, 2 if name == "hangs" else 300):
            report.row(case=name, process=os.getpid())
            if name == "raises":
                raise ArithmeticError("seven")
            if name == "has no memory":
                raise torch.OutOfMemoryError("3 GiB are missing\nand more is told")
            if name == "cannot":
                raise NotApplicable("no room")
            if name == "dies":
                os._exit(9)
            if name in ("hangs", "goes on"):
                time.sleep(600)


def lost(names: Sequence[str], report: Report) -> None:
    """A part that does not get to its cases."""
    raise ArithmeticError("before any case")
