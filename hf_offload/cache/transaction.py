"""Guards a cache: one thread at a time, and each forward and each change of it as a whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers.cache_utils import DynamicLayer

from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.sealing import seal
from hf_offload.cache.settings import Settings
from hf_offload.cpu.thread_pool import WorkerError


class Transaction:
    """A forward or a change of a cache, by the thread that has begun it.

    An interruption (Ctrl-C) may come between any two instructions, so that nobody ends what was begun. Whoever begins
    next rolls it back first; a rollback may run twice.

    Args:
        layers: of the cache, ours and Transformers' own.
        settings: what ours share.
        undo_stock: crops Transformers' own layers to so many tokens.
    """

    def __init__(self, layers: list[Any], settings: Settings, undo_stock: Callable[[int], None]) -> None:
        self._layers, self._settings, self._undo_stock = layers, settings, undo_stock
        self._holder: dict[int | None, int] = {}  # `setdefault` decides between two threads
        self._torn: str | None = None
        self.floor: int | None = None
        """Tokens to which a forward that does not end goes back; None: none is open."""
        self.calls: dict[int, Any] = {}
        """The keyword arguments of the decoder layers that the forward now running has reached."""

    @property
    def open(self) -> bool:
        """Whether a forward is running, or was interrupted and not rolled back yet."""
        return self.floor is not None

    @property
    def hybrid(self) -> list[HybridLayer]:
        """Those of the layers that hold blocks."""
        return [layer for layer in self._layers if isinstance(layer, HybridLayer)]

    # --- one thread --------------------------------------------------------------------------------------------------

    @property
    def mine(self) -> bool:
        """Whether this thread has the cache."""
        holder = self._holder.get(None)
        while holder in self._holder:
            holder = self._holder[holder]
        return holder == threading.get_ident()

    def take(self, *, torn: bool = False) -> None:
        """Have the cache for this thread.

        Args:
            torn: whether layers may differ.

        Raises:
            RuntimeError: another thread has it, or a change of the rows did not come to its end.
        """
        me = threading.get_ident()
        holder = self._holder.setdefault(None, me)
        while holder != me:
            thread = next((thread for thread in threading.enumerate() if thread.ident == holder), None)
            if thread is not None:
                raise RuntimeError(
                    f"the thread {thread.name!r} is at work with this cache, or was interrupted in it; a cache serves "
                    "one thread at a time: give each its own (caches of one model may run at once), or call crop(0) "
                    "there"
                )
            holder = self._holder.setdefault(holder, me)  # the heir of a thread that is gone
        if self._torn is not None and not torn:
            what = self._torn
            self.leave()
            raise RuntimeError(f"{what} did not come to its end, so that layers differ; call reset()")

    def leave(self) -> None:
        """Let others have the cache."""
        self._holder.clear()

    @contextmanager
    def changing_rows(self, what: str) -> Iterator[None]:
        """What is inside changes the rows of all layers; where it does not end, only `reset()` helps."""
        self.tear(what)
        yield
        self._torn = None

    def tear(self, what: str) -> None:
        """Refuse all but `reset()` from here on: layers differ, since `what` did not come to its end."""
        self._torn = what

    # --- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, past: int) -> None:
        """Begin a forward behind `past` tokens.

        Raises:
            RuntimeError: the forward before was interrupted and has been rolled back now, or another thread has the
                cache.
        """
        self.take()
        held = self.floor
        if held is not None:
            try:
                self.rollback()
            finally:
                self.leave()
            raise RuntimeError(
                f"the last forward was interrupted; the cache holds the {held} tokens from before it; run it again "
                "with the inputs that follow these"
            )
        self.calls.clear()
        self.floor = min((layer.past for layer in self.hybrid), default=past)

    def reopen(self, past: int) -> None:
        """Have a forward be running that has ended already, behind `past` tokens."""
        self.take()
        self.floor = past

    def commit(self) -> None:
        """Keep what the forward has done; there is nothing to roll back any more."""
        self.calls.clear()
        self.floor = None

    def rollback(self, *, interrupted: bool = True) -> None:
        """Forget the tokens of a forward that did not end; nothing if there is none.

        Args:
            interrupted: whether it ended between any two instructions, not by an error that passed through it.

        Raises:
            RuntimeError: layers with sliding windows or linear attention have taken them in and cannot forget.
            WorkerError: work in flight does not end in time.
        """
        length = self.floor
        if length is None:
            return
        self.calls.clear()  # they hold the cache, too
        if self._settings.progress is not None:
            self._settings.progress.end(False)
        layers = self.hybrid
        for layer in layers:
            with suppress(WorkerError):  # the fault that ended that forward is on its way to the caller
                layer.drain()
        if interrupted:
            self._halt(layers)
        for layer in layers:
            layer.pending = None
            layer.snapshots.clear()
            layer.go_back(length)
            layer.forget_plans()
        self._settings.padding.truncate(length)
        if interrupted:
            self._derive(layers)
        self._undo_stock(length)
        self.floor = None

    def _halt(self, layers: list[HybridLayer]) -> None:
        """Have no work in flight, known or not, and nothing resident."""
        self._settings.worker.settle()
        for mirror in self._settings.mirrors.values():
            if mirror.stream is not None:
                mirror.stream.synchronize()
        for layer in layers:
            if layer.is_initialized:
                layer.unplace()
                layer.kernels.clear()

    def _derive(self, layers: list[HybridLayer]) -> None:
        """Derive anew what is derived from the tokens: any of it may be half done."""
        self._settings.padding.look_again()
        for layer in layers:
            store = layer.store
            if store is not None:
                store.revision += 1
                store.pool.revision += 1
                layer.state.adopted(layer)
                if store.sealed < store.length // store.block_size:
                    seal(store, self._settings.prefill_tile)

    # --- a change ----------------------------------------------------------------------------------------------------

    def crop(self, tokens: int, left: int) -> None:
        """Drop the last `-tokens` tokens of every layer, or none if a layer refuses.

        Args:
            tokens: 0 or less.
            left: how many are left in all layers, to which a rollback goes if this is interrupted.
        """
        layers = self.hybrid
        removed = [layer.prepare_crop(tokens) for layer in layers]
        stock = [layer for layer in self._layers if not isinstance(layer, HybridLayer)]
        self.floor = left
        for count, layer in enumerate(sorted(stock, key=lambda layer: type(layer) is DynamicLayer)):
            try:
                layer.crop(tokens)
            except Exception:  # it refuses, as others than plain layers may
                self.floor = None
                if count:
                    self.tear(f"crop({tokens})")
                raise
        for layer, mine in zip(layers, removed, strict=True):
            layer.go_back(layer.past + mine)
        self.floor = None
