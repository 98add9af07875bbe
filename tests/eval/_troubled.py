"""A part of the GPU check whose cases fail, crash and hang, for processes that import nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu.supervise import Cases, Stopped

if TYPE_CHECKING:
    from gpu.models import Options

NAMES = ("first", "cannot", "dies", "next", "hangs")


def cases(options: Options) -> Cases:
    return {name: (2.0 if name == "hangs" else 300.0, partial(run, name)) for name in NAMES}


def run(name: str) -> Iterator[dict[str, Any]]:
    yield {"case": name, "process": os.getpid()}
    if name == "cannot":
        raise Stopped("not applicable", "no room")
    if name == "dies":
        os._exit(9)
    if name == "hangs":
        time.sleep(600)
