"""`Transaction`: a cache is used by one thread at a time, and a forward or change is applied fully or rolled back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers.cache_utils import DynamicLayer

from hf_offload.blocks.sealing import seal
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.settings import Settings
from hf_offload.cpu.thread_pool import WorkerError


class Transaction:
    """The running forward or change of a cache, and the thread that runs it.

    An interruption (Ctrl-C) may come between any two instructions and leave a forward open. The next forward then rolls
    it back first. A rollback may run twice.

    Args:
        layers: the cache's layers, `HybridLayer`s and Transformers' own.
        settings: settings of the `HybridLayer`s.
        undo_stock: crops Transformers' own layers to a number of tokens.
    """

    def __init__(self, layers: list[Any], settings: Settings, undo_stock: Callable[[int], None]) -> None:
        self._layers, self._settings, self._undo_stock = layers, settings, undo_stock
        self._holder: dict[int | None, int] = {}  # `setdefault` decides between two threads
        self._inconsistent: str | None = None
        self.turn = object()
        """Another object whenever a thread has taken the cache: it may have changed since."""
        self.floor: int | None = None
        """The length to which a failed forward is rolled back; None: no forward is open."""
        self.calls: dict[int, Any] = {}
        """The keyword arguments of the decoder layers that the running forward has reached, by index."""

    @property
    def open(self) -> bool:
        """Whether a forward is running, or was interrupted and not rolled back yet."""
        return self.floor is not None

    @property
    def hybrid(self) -> list[HybridLayer]:
        """The layers that hold blocks."""
        return [layer for layer in self._layers if isinstance(layer, HybridLayer)]

    # --- one thread --------------------------------------------------------------------------------------------------

    @property
    def held_by_this_thread(self) -> bool:
        """Whether this thread holds the cache."""
        return self._thread() == threading.get_ident()

    def _thread(self) -> int | None:
        """The thread that holds the cache, or None."""
        thread = self._holder.get(None)
        while thread in self._holder:
            thread = self._holder[thread]
        return thread

    def take(self, *, inconsistent: bool = False) -> None:
        """Take the cache for this thread.

        Args:
            inconsistent: whether to allow layers with different rows (`mark_inconsistent`).

        Raises:
            RuntimeError: another thread holds it, or a change of the rows was not completed.
        """
        me = threading.get_ident()
        holder = self._holder.setdefault(None, me)
        while holder != me:
            _refuse_live(holder)
            holder = self._holder.setdefault(holder, me)  # successor of a thread that has ended
        self.turn = object()
        if self._inconsistent is not None and not inconsistent:
            what = self._inconsistent
            self.leave()
            raise RuntimeError(f"{what} was not completed, so that layers differ; call reset()")

    def check_alone(self) -> None:
        """Check that no other thread is at work with the cache.

        Raises:
            RuntimeError: one is.
        """
        thread = self._thread()
        if thread not in (None, threading.get_ident()):
            _refuse_live(thread)

    def leave(self) -> None:
        """Release the cache for other threads."""
        self._holder.clear()

    @contextmanager
    def changing_rows(self, what: str) -> Iterator[None]:
        """Mark the body as a change of the rows of all layers; if it does not complete, only `reset()` is allowed."""
        self.mark_inconsistent(what)
        yield
        self._inconsistent = None

    def mark_inconsistent(self, what: str) -> None:
        """Refuse all but `reset()` from here on, since `what` left layers with different tokens or rows."""
        self._inconsistent = what

    # --- a forward ---------------------------------------------------------------------------------------------------

    def begin(self, past: int) -> None:
        """Begin a forward.

        Args:
            past: tokens before it; used if no layer is a `HybridLayer`, since those know.

        Raises:
            RuntimeError: the previous forward was interrupted and has now been rolled back, or another thread holds the
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
        """Open an already committed forward again, after `past` tokens."""
        self.take()
        self.floor = past

    def commit(self) -> None:
        """Keep the forward's tokens."""
        self.calls.clear()
        self.floor = None

    def rollback(self, *, interrupted: bool = True) -> None:
        """Drop the tokens of an open forward, if there is one.

        Args:
            interrupted: whether it was interrupted between any two instructions, not ended by an exception.

        Raises:
            RuntimeError: layers with sliding windows or linear attention hold the tokens and cannot drop them.
            WorkerError: work in flight does not end in time.
        """
        length = self.floor
        if length is None:
            return
        self.calls.clear()  # they reference the cache
        if self._settings.progress is not None:
            self._settings.progress.end(False)
        layers = self.hybrid
        for layer in layers:
            with suppress(WorkerError):  # the caller already gets the exception that ended the forward
                layer.drain()
        if interrupted:
            self._halt(layers)
        for layer in layers:
            layer.take_pending()
            layer.snapshots.clear()
            layer.go_back(length)
            layer.forget_plans()
        self._settings.padding.truncate(length)
        if interrupted:
            self._derive(layers)
        self._undo_stock(length)
        self.floor = None

    def _halt(self, layers: list[HybridLayer]) -> None:
        """Wait for all work in flight, known or not, and drop the resident sets."""
        self._settings.worker.wait_for_all()
        for mirror in self._settings.mirrors.values():
            if mirror.stream is not None:
                mirror.stream.synchronize()
        for layer in layers:
            if layer.is_initialized:
                layer.unplace()
                layer.step_buffers.clear()

    def _derive(self, layers: list[HybridLayer]) -> None:
        """Recompute everything derived from the tokens, which may be half updated."""
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
            left: tokens that remain in all layers; a rollback after an interruption goes there.
        """
        layers = self.hybrid
        removed = [layer.prepare_crop(tokens) for layer in layers]
        stock = [layer for layer in self._layers if not isinstance(layer, HybridLayer)]
        self.floor = left
        for count, layer in enumerate(sorted(stock, key=lambda layer: type(layer) is DynamicLayer)):
            try:
                layer.crop(tokens)
            except Exception:  # layers other than `DynamicLayer` may refuse
                self.floor = None
                if count:
                    self.mark_inconsistent(f"crop({tokens})")
                raise
        for layer, count in zip(layers, removed, strict=True):
            layer.go_back(layer.past + count)
        self.floor = None


def _refuse_live(ident: int | None) -> None:
    """Raise RuntimeError if a thread is live; `threading` may not have made it."""
    if ident in sys._current_frames():
        name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), ident)
        raise RuntimeError(
            f"the thread {name!r} is at work with this cache, or was interrupted in it; a cache serves one thread at a "
            "time: give each its own (caches of one model may run at once), or call crop(0) there"
        )
