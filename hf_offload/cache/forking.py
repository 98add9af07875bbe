"""A second cache over the blocks of a first one: what is full is shared, what is written into is copied first."""

from __future__ import annotations

from typing import Any

from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.opening import open_layer
from hf_offload.cache.padding import Padding
from hf_offload.cache.sealing import seal
from hf_offload.cache.sharing import share_blocks
from hf_offload.cache.stock import copy_layer


def fork_layers(source: list[Any], target: list[Any], padding: Padding, copied: Padding) -> None:
    """Let the empty layers of a new cache hold what those of another hold, nothing of which is in flight.

    Host blocks and their digests are shared. Resident sets, what policies remember, padding and stock layers are
    copied, so that both caches go on as the first would have gone on alone.

    Args:
        source, target: the layers.
        padding, copied: validity of the tokens in each.
    """
    copied.copy_from(padding.valid[:, : padding.seen], dense=padding.dense)
    for index, layer in enumerate(source):
        if isinstance(layer, HybridLayer):
            _fork(layer, target[index])
        else:
            target[index] = copy_layer(layer)


def _fork(source: HybridLayer, target: HybridLayer) -> None:
    target.scores, target.revision = source.scores, target.settings.padding.revision
    if source.store is None:
        return
    source.rollback.clear()  # what it would put back is shared from here on
    source.write_back()
    target.slots = None if source.resident is None else source.resident.slots
    store = source.store
    open_layer(target, store.batch, store.num_kv_heads, store.head_dim, source.dtype, source.device)
    assert target.store is not None
    share_blocks(target.store, source.store)
    seal(target.store, target.settings.prefill_tile)  # blocks of padding alone have digests, but no statistics to share
    target.last_queries, target.unplaced = source.last_queries, source.unplaced
    if target.resident is not None and source.resident is not None:
        target.resident.copy_from(source.resident)
    target.state.share(target, source.state)
