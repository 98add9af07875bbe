"""The one place where scripts look inside the package: the launches of a step, the blocks that caches hold.

Scripts that import it measure the package of this checkout alone; the others run on older commits, too (`versus.py`).
Beside it `bench_cpu.py` calls the kernels, and `quality.py` and `context_attention.py` use
`hf_offload.tools.measuring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from transformers import AttentionInterface, Cache, PreTrainedModel

import common
from hf_offload.blocks.block_store import KEEP_TOKENS, BlockStore
from hf_offload.cpu.launch import Launch, LaunchSequence
from hf_offload.model.hooks import hybrid_layers

PREDICT = "the properties of the heads"
RETRIEVAL = (PREDICT, "the choice of host blocks", "counts of the choice", "attention to the host")
"""Labels of the launches in which the CPU chooses and attends blocks of the host."""


WATCHES = ("attention", "kernels", "retrieval", "predict")


@contextmanager
def watching(name: str, cache: Cache) -> Iterator[dict[str, float]]:
    """Stopwatches that run while attention is computed: seconds by name.

    "attention": in the attention function of this name and in the cache's `update`; "kernels": of them in compiled
    kernels; "retrieval": of these in the launches of `RETRIEVAL`; "predict": of these in Fluxion's prediction. With two
    memories the last three count the threads that run beside the model's, too.
    """
    seconds = dict.fromkeys(WATCHES, 0.0)
    attend, run = AttentionInterface()[name], LaunchSequence.run
    parts: WeakKeyDictionary[LaunchSequence, list[tuple[tuple[str, ...], LaunchSequence]]] = WeakKeyDictionary()

    @contextmanager
    def timed(*names: str) -> Iterator[None]:
        """Let some of the stopwatches run inside."""
        with common.clock() as spent:
            yield
        for one in names:
            seconds[one] += spent[0]

    def run_parts(sequence: LaunchSequence) -> None:
        if sequence not in parts:
            groups = [(names, list(launches)) for names, launches in groupby(sequence.launches, _names_of)]
            parts[sequence] = [(names, LaunchSequence(each) if groups[1:] else sequence) for names, each in groups]
        for names, part in parts[sequence]:
            with timed(*names):
                run(part)

    AttentionInterface.register(name, timed("attention")(attend))
    update = mock.patch.object(cache, "update", timed("attention")(cache.update))
    try:
        with mock.patch.object(LaunchSequence, "run", run_parts), update:
            yield seconds
    finally:
        AttentionInterface.register(name, attend)


def _names_of(launch: Launch) -> tuple[str, ...]:
    if not launch.label.startswith(RETRIEVAL):
        return ("kernels",)
    return ("kernels", "retrieval", *(("predict",) if launch.label.startswith(PREDICT) else ()))


def token_bytes(model: PreTrainedModel, layers: int) -> int:
    """Bytes of one token's keys and values in so many layers, by the model's config and dtype."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * layers * heads * size * model.dtype.itemsize)


def stores_of(cache: Any) -> list[BlockStore]:
    """The blocks of a cache's layers that hold some."""
    return [layer.store for layer in hybrid_layers(cache) if layer.store is not None]


def stored_tokens(cache: Cache, attended: float) -> float:
    """So many attended tokens as unpacked ones of the same bytes: older blocks may be packed (`host_dtype`)."""
    stores = [store for store in stores_of(cache) if store.format.packs]
    if not stores:
        return attended
    newest = min(attended, KEEP_TOKENS)
    return newest + (attended - newest) * stores[0].format.record_bytes / stores[0].pool.record_bytes


def digest_bytes(cache: Any) -> int:
    """Bytes of the digests of a row's full blocks, which a step scores."""
    return sum(store.sealed * store.digests.block_bytes for store in stores_of(cache) if store.digests is not None)


def slab_bytes(cache: Any) -> int:
    """Bytes that the pools of a cache have taken, in use or not."""
    pools = {id(store.pool): store.pool for store in stores_of(cache)}.values()
    return sum(slab.nbytes for pool in pools for slab in (*pool.slabs, *pool.packed_slabs))
