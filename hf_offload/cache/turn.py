"""Who may use a cache now: one thread at a time, and nobody while some layers have other rows than the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """One thread's turn with a cache: a forward, or a change of what is cached.

    An interruption (Ctrl-C) may come between any two instructions, so that a turn may never end; the same thread may
    begin another one then.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}  # `setdefault` decides between two threads
        self._torn: str | None = None

    @property
    def mine(self) -> bool:
        """Whether it is this thread's turn."""
        return self._holder.get("thread") == threading.get_ident()

    def take(self, *, torn: bool = False) -> None:
        """Begin a turn.

        Args:
            torn: whether the cache may be in pieces.

        Raises:
            RuntimeError: it is another thread's turn, or a change of the rows did not come to its end.
        """
        me = threading.get_ident()
        holder = self._holder.setdefault("thread", me)
        if holder != me:
            thread = next((thread for thread in threading.enumerate() if thread.ident == holder), None)
            if thread is not None:
                raise RuntimeError(
                    f"the thread {thread.name!r} is at work with this cache, or was interrupted in it; a cache serves "
                    "one thread at a time: give each its own (caches of one model may run at once), or call crop(0) "
                    "there"
                )
            self._holder["thread"] = me
        if self._torn is not None and not torn:
            what = self._torn
            self.leave()
            raise RuntimeError(f"{what} did not come to its end, so that layers differ in their rows; call reset()")

    def leave(self) -> None:
        """End the turn."""
        self._holder.clear()

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """What is inside changes the rows of all layers, or the cache is in pieces."""
        self._torn = what
        yield
        self._torn = None
