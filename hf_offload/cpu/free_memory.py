"""Memory checks before work that aborts the process when memory runs out (LLVM, threads)."""

from __future__ import annotations

import mmap

_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def check_free(nbytes: int, what: str) -> None:
    """Check that `nbytes` could be mapped now, without keeping them.

    Raises:
        MemoryError: they could not; the message names `what` they are for.
    """
    try:
        mmap.mmap(-1, nbytes, **_PRIVATE).close()
    except OSError as error:
        raise MemoryError(f"no host memory left for {what} ({nbytes >> 20} MiB must be free). {error}") from error
