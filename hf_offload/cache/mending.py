"""After an interruption between any two instructions: what may be half done is done again or given up."""

from __future__ import annotations

from collections.abc import Sequence

from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.sealing import seal
from hf_offload.cache.settings import Settings


def halt(layers: Sequence[HybridLayer], settings: Settings) -> None:
    """Bring layers whose forward was interrupted to rest: no work in flight that nobody knows of, nothing resident.

    Raises:
        WorkerError: a thread does not end its work in time.
    """
    settings.worker.settle()
    for mirror in settings.mirrors.values():
        if mirror.stream is not None:
            mirror.stream.synchronize()
    for layer in layers:
        if layer.is_initialized:
            layer.unplace()
            layer.kernels.clear()


def mend(layers: Sequence[HybridLayer], settings: Settings) -> None:
    """Derive anew, in layers that hold the right tokens again, what is derived from them."""
    settings.padding.look_again()
    for layer in layers:
        store = layer.store
        if store is not None:
            store.revision += 1
            store.pool.revision += 1
            if layer.salience is not None:
                layer.salience.keep_all()
            if store.sealed < store.length // store.block_size:
                seal(store, settings.prefill_tile)
