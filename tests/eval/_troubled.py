"""A part of the GPU check whose cases fail, crash and hang, for processes that import nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu.supervise import Cases, NotApplicable

NAMES = ("first", "cannot", "dies", "next", "hangs")


def cases(options: None) -> Cases:
    return {name: (2.0 if name == "hangs" else 300.0, partial(run, name)) for name in NAMES}


def run(name: str) -> Iterator[dict[str, Any]]:
    yield {"case": name, "process": os.getpid()}
    if name == "cannot":
        raise NotApplicable("no room")
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(600)
