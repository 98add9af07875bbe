"""Random histories of one or two caches and their invariants, with a reference model, for the property tests."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pools import used_blocks
from tiny import DEVICE, SIZES, tiny_model
from transformers import LlamaConfig, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.token_mass import TokenMass

LATE = 0.0005  # seconds by which every hand-over of the second cache is late
INT8_ERROR = 0.1  # of the largest logit
Rows = tuple[tuple[int, ...], ...]


@functools.cache
def model_of(kv_heads: int, dim: int, attn_implementation: str) -> PreTrainedModel:
    """A random model of two layers with four query heads; the same weights whatever the attention implementation."""
    sizes = {**SIZES, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_key_value_heads=kv_heads, head_dim=dim)
    return tiny_model(config, attn_implementation)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@functools.lru_cache(64)
def full_attention(kv_heads: int, dim: int, ids: Rows, mask: Rows) -> torch.Tensor:
    """Logits of the stock model, computed once for histories that begin alike."""
    tokens, seen = (torch.tensor(rows, device=DEVICE) for rows in (ids, mask))
    stock = model_of(kv_heads, dim, "sdpa")
    logits: torch.Tensor = stock(tokens, attention_mask=seen, position_ids=positions_of(seen), use_cache=False).logits
    return logits


@dataclass(frozen=True)
class Setting:
    """What caches are made with, and what they can be held to.

    If it is `exact`, the logits must be those of full attention, up to int8. Otherwise two caches, one of which is slow
    in every hand-over, must agree in every bit.
    """

    kv_heads: int
    dim: int
    policy: str
    knobs: dict[str, Any]
    exact: bool

    @property
    def model(self) -> PreTrainedModel:
        return model_of(self.kv_heads, self.dim, "hybrid_sparse")

    def make(self) -> list[HybridCache]:
        """The caches that live through a history together."""
        caches = [HybridCache(self.model, self.policy, **self.knobs) for _ in range(1 if self.exact else 2)]
        return late(caches)


def late(caches: list[HybridCache]) -> list[HybridCache]:
    """Make every hand-over of the second cache, if there is one, late."""
    for cache in caches[1:]:
        cache.settings.worker.delay = LATE
    return caches


class History:
    """Caches, and the tokens `[B, T]` that they must hold."""

    def __init__(self, setting: Setting, caches: list[HybridCache], ids: torch.Tensor, mask: torch.Tensor) -> None:
        self.setting, self.caches, self.ids, self.mask = setting, caches, ids, mask

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @torch.no_grad()
    def feed(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Take tokens `[B, n]` in and compare the logits of those that are no padding."""
        whole, seen = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)
        start = self.length
        got = [self.run(cache, ids, seen) for cache in self.caches]
        self.ids, self.mask = whole, seen
        real = mask.bool()
        assert got[0][real].isfinite().all()
        if not self.setting.exact:
            assert torch.equal(got[0][real], got[1][real]), "the slow cache came to other logits"
            return
        rows = (tuple(map(tuple, each.tolist())) for each in (whole, seen))
        want = full_attention(self.setting.kv_heads, self.setting.dim, *rows)[:, start:]
        largest = max(1.0, want[real].abs().max().item())
        error = (got[0][real] - want[real]).abs().max().item() / largest
        assert error <= (INT8_ERROR if self.setting.knobs.get("host_dtype") == "int8" else 1e-5), (
            f"off by {error:.2g} of the largest logit"
        )

    def run(self, cache: HybridCache, ids: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Logits of new tokens `[B, n]`, given the mask of all tokens."""
        logits: torch.Tensor = self.setting.model(
            ids,
            attention_mask=None if bool(seen.all()) else seen,
            position_ids=positions_of(seen)[:, self.length :],
            past_key_values=cache,
        ).logits
        return logits

    def replaced(self, caches: list[HybridCache]) -> History:
        """The same tokens in other caches."""
        return History(self.setting, late(caches), self.ids, self.mask)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Say that the caches keep the rows of an index."""
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    def crop(self, tokens: int) -> None:
        """Drop the last tokens, all where there are fewer."""
        for cache in self.caches:
            cache.crop(-tokens)
        left = max(self.length - tokens, 0)
        self.ids, self.mask = self.ids[:, :left], self.mask[:, :left]


def empty(setting: Setting, rows: int) -> History:
    """A history that begins."""
    nothing = torch.zeros(rows, 0, dtype=torch.long, device=DEVICE)
    return History(setting, setting.make(), nothing, nothing)


def check_books(histories: list[History], *, leaks: bool = False) -> None:
    """Sizes, padding and references are those of the tokens; no block is held by nobody, unless it may have leaked."""
    held: dict[int, tuple[Any, list[np.ndarray]]] = {}
    deciding: set[int] = set()
    for history in histories:
        for cache in history.caches:
            assert cache.get_seq_length() == history.length
            padding = cache.settings.padding
            if history.length:
                valid = padding.valid[:, : history.length] != 0
                assert np.array_equal(valid, history.mask.cpu().numpy() != 0), "padding is not that of the masks"
            for layer in hybrid_layers(cache):
                assert layer.past == history.length
                assert layer.pending is None
                store = layer.store
                if store is None:
                    continue
                if isinstance(layer.state, TokenMass):
                    _check_lists(layer.state, held, deciding)
                assert store.sealed == store.length // store.block_size, "between steps all full blocks are sealed"
                assert store.reserved >= store.num_blocks
                pool, tables = held.setdefault(id(store.pool), (store.pool, []))
                tables.append(store.table[:, : store.reserved].ravel())
    for pool, tables in (each for number, each in held.items() if number not in deciding):
        ids, counts = np.unique(np.concatenate(tables).astype(np.int64), return_counts=True)
        used = used_blocks(pool)  # releases what collected caches held
        if not np.array_equal(pool.refcount[ids], counts):
            gc.collect()  # a kernel was compiled: Numba's frames hold a cache that was dropped until then
            used = used_blocks(pool)
        assert np.array_equal(pool.refcount[ids], counts), "references that nobody holds, or holders without one"
        assert leaks or used == len(ids), "blocks that nobody holds are not free"
        addresses = pool.block_ptr[ids]
        assert len(np.unique(addresses)) == len(ids), "two blocks lie in the same place"


def _check_lists(mass: TokenMass, held: dict[int, tuple[Any, list[np.ndarray]]], deciding: set[int]) -> None:
    """The lists hold what is marked as kept and nothing else, unless that is being decided; note their blocks."""
    context, stop = mass.now.retained, mass.now.outside
    assert stop <= mass.store.length
    if mass._job is not None:
        deciding.add(id(context.pool))
        return
    marks = mass.now.kept[:, :, :stop].reshape(context.lists, stop)
    for marked, positions, count in zip(marks, context.positions, context.counts, strict=True):
        assert np.array_equal(np.flatnonzero(marked), positions[:count]), "lists are not what is marked"
    before = mass._before  # what a crop that takes the last append back returns to
    for lists in {id(each): each for each in (context, *(() if before is None else (before[1].retained,)))}.values():
        held.setdefault(id(lists.pool), (lists.pool, []))[1].extend(
            lists.table[i, :n] for i, n in enumerate(lists.block_counts[:, 0])
        )
