"""Fallback to `DynamicCache`'s layers for keys and values that a `HybridLayer` cannot hold, within one cache.

The need shows in the first forward: by the shapes of K and V, or in the attention function, if the model changes them
after the cache. The first forward is exact even then, since all keys and values are its own.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.masking_utils import sdpa_mask

from hf_offload.cache.arrivals import unsuitable
from hf_offload.cache.layer import HybridLayer

CHANGED = "the model changes keys or values after the cache"
_last_updated = threading.local()


class Fallback:
    """The layers of one cache that were replaced by stock layers.

    Args:
        model: the model's name, for messages.
        layers: the cache's list of layers, changed in place.
        elsewhere: numbers of the layers that cache other tokens than the text's.
        compact: whether masks may be compact: the model does not slice them (models whose layers share K and V may).
        graphs: whether steps are captured as CUDA graphs, which stock layers do not allow.
    """

    def __init__(self, model: str, layers: list[Any], elsewhere: set[int], *, compact: bool, graphs: bool) -> None:
        self.model, self.layers, self.elsewhere, self.compact, self.graphs = model, layers, elsewhere, compact, graphs
        self.reasons: dict[int, str] = {}
        """The reason for each replaced layer, by its number."""
        self._warned = 0
        self._hybrid_indices = [index for index, layer in enumerate(layers) if isinstance(layer, HybridLayer)]
        self._choose_masks()

    def taken_over(self) -> None:
        """Record stock layers that came from another cache (`from_cache`, `fork`, `load`).

        Raises:
            ValueError: there is a stock layer, but steps are captured as CUDA graphs.
        """
        for index in self._hybrid_indices:
            if not isinstance(self.layers[index], HybridLayer) and index not in self.reasons:
                self._note(index, "they were so in the cache before this one")
        self._warned = len(self.reasons)
        self._choose_masks()

    def admit(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Replace a layer if its first K and V do not fit into blocks; called before `update`.

        Raises:
            ValueError: the layer needs a stock layer, but steps are captured as CUDA graphs.
        """
        layer = self.layers[index]
        if not isinstance(layer, HybridLayer) or layer.past:
            return
        reason = None if layer.is_initialized else unsuitable(key, value)
        if reason is None:
            _last_updated.layer = weakref.ref(layer)
        else:
            self._replace(index, reason)

    def replace_changed(self) -> None:
        """After a forward, replace layers whose K and V the model changed, and warn of all replaced layers once."""
        for layer in list(self.layers):
            if isinstance(layer, HybridLayer) and layer.pending is not None and layer.changed:
                key, value = layer.pending
                layer.take_pending()
                self._replace(layer.index, CHANGED).update(key, value)
        if len(self.reasons) > self._warned:
            self._warned = len(self.reasons)
            warnings.warn(self._message(), stacklevel=2)

    def undo(self, length: int) -> None:
        """Crop stock layers to `length` tokens after a failed forward.

        Raises:
            RuntimeError: layers with sliding windows or linear attention hold tokens of it and cannot crop.
        """
        stuck = False
        for index, layer in enumerate(self.layers):
            if isinstance(layer, HybridLayer):
                continue
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                stuck |= any(
                    (*layer.is_conv_states_initialized.values(), *layer.is_recurrent_states_initialized.values())
                )
            elif getattr(layer, "is_sliding", False):
                stuck |= layer.get_seq_length() not in (0, length)
            elif isinstance(layer, DynamicLayer) and not (index in self.elsewhere and length):
                layer.crop(min(length - layer.get_seq_length(), 0))
        if stuck:
            raise RuntimeError(
                "layers with sliding windows or linear attention cannot undo a forward that failed; call reset() on the"
                " cache"
            )

    def _replace(self, index: int, reason: str) -> DynamicLayer:
        self._note(index, reason)
        stock = self.layers[index] = DynamicLayer()
        self._choose_masks()
        return stock

    def _note(self, index: int, reason: str) -> None:
        if self.graphs:
            raise ValueError(
                f"cuda_graph=True: layer {index} of {self.model} needs Transformers' own cache layer, which cannot be "
                f"captured ({reason}); leave it out"
            )
        self.reasons[index] = reason

    def _choose_masks(self) -> None:
        """Allow compact masks only if no stock layer with full attention, which needs a dense mask, shares them."""
        hybrid = [layer for layer in self.layers if isinstance(layer, HybridLayer)]
        stock: list[Any] = [x for x in self.layers if isinstance(x, CacheLayerMixin) and x not in hybrid]
        compact = self.compact and all(layer.is_sliding for layer in stock)
        for layer in hybrid:
            layer.compact_masks = compact

    def _message(self) -> str:
        hybrid_left = sum(isinstance(layer, HybridLayer) for layer in self.layers)
        which = ", ".join(map(str, sorted(self.reasons))) if hybrid_left else "all"
        reasons = "; ".join(dict.fromkeys(self.reasons.values()))
        rest = "" if hybrid_left else ", and DynamicCache does the same with less work"
        return (
            f"HybridCache keeps Transformers' own cache in layers of {self.model} ({which}), because {reasons}: "
            f"they are exact, but none of their keys and values is offloaded{rest}"
        )


def note_changed(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
    """Mark the layer updated last as changed if these untagged K and V may be a changed form of its pending ones."""
    layer = getattr(_last_updated, "layer", lambda: None)()
    if layer is None or layer.pending is None or layer.past or not layer.modules(module):
        return
    layer.changed = query.shape[2] == key.shape[2] == layer.pending[0].shape[2]


def first_mask(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> Any:
    """Expand the compact mask `[B, keys]` of a first forward to sdpa's mask.

    Raises:
        ValueError: not the first forward: cached keys are missing.
    """
    if not query.shape[2] == key.shape[2] == mask.shape[1]:
        raise ValueError(
            f"{type(module).__name__} changes keys or values after the cache; use DynamicCache for this model"
        )
    return sdpa_mask(
        batch_size=query.shape[0],
        q_length=query.shape[2],
        kv_length=key.shape[2],
        attention_mask=mask,
        device=query.device,
    )
