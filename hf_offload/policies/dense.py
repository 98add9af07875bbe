"""The knob `dense`: whether steps attend all tokens while all are resident, in place of a choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_offload.knobs import shown

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer

DENSE_BYTES = 640 << 20
"""Keys and values of a layer, all rows, that a GPU attends in less time than it takes to choose among them."""


def check_dense(dense: object) -> None:
    """Check the knob `dense`.

    Raises:
        ValueError: the value is not allowed.
    """
    if dense != "auto" and not isinstance(dense, bool):
        raise ValueError(f'dense={shown(dense)} is not True, False or "auto"; use one of these')


def attends_all(dense: bool | str, layer: HybridLayer, tokens: int, budget: int) -> bool:
    """`Policy.attends_all` by the knob `dense`: "auto": within the budget, and where a choice would take longer.

    Args:
        dense: the knob.
        layer: the layer.
        tokens: of a row.
        budget: tokens that a step would attend.
    """
    if dense != "auto":
        return bool(dense)
    store = layer.store
    assert store is not None
    token_bytes = store.batch * store.num_kv_heads * store.pool.record_bytes / store.block_size
    return tokens <= budget or tokens * token_bytes <= DENSE_BYTES
