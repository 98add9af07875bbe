"""Room for what cannot raise where it gets no memory: a compiler, or a thread, would end the process."""

from __future__ import annotations

import mmap

_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def have_room(nbytes: int, what: str) -> None:
    """See that so many bytes could be had now; none are taken.

    Raises:
        MemoryError: they cannot; `what` they are for is told.
    """
    try:
        mmap.mmap(-1, nbytes, **_PRIVATE).close()
    except OSError as error:
        raise MemoryError(f"no host memory left for {what} ({nbytes >> 20} MiB must be free). {error}") from error
