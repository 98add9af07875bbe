"""`Draw`: the drawn pairs of one layer's steps, with one memory and with two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_offload.blocks.block_store import BlockStore
from hf_offload.cache.stats import LayerStats
from hf_offload.cpu.kernels import draw_pairs as drawing
from hf_offload.cpu.kernels.decode_attention import Pairs
from hf_offload.cpu.kernels.digest_scores import Digest
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import Launch
from hf_offload.policies.base import Selection
from hf_offload.scores import Scores

Buffer = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]
"""Gives scratch by name, shape and dtype."""


def own_buffer(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A `Buffer` of new memory."""
    return np.empty(shape, dtype)


class Draw:
    """Lists of drawn pairs, and the launch that fills them; the attention to the selection reads them.

    Args:
        store: the layer's blocks.
        stats: the layer's statistics, which count what is drawn and its errors.
        query_heads: of the layer.
        samples: a pair with more than 1 / samples of a head's attention is always listed.
        join: how the query heads of a KV head are joined, `"max"` or `"mean"`.
        width: the most blocks that have digests.
        sure: number of further pairs that are listed whatever their shares.
        counts: int32 `[B, Hkv]`, for the lists' lengths; None: an array of its own.
        skipped: as in `decode_attention.Pairs`.
        buffer: gives scratch, which nothing else uses while the launch runs.
    """

    def __init__(
        self,
        store: BlockStore,
        stats: LayerStats,
        query_heads: int,
        samples: int,
        join: str,
        width: int,
        *,
        sure: int = 0,
        counts: np.ndarray | None = None,
        skipped: np.ndarray | None = None,
        buffer: Buffer = own_buffer,
    ) -> None:
        self.store, self.stats, self.samples, self.join, self.width = store, stats, samples, join, width
        size, rows = store.block_size // 2, (store.batch, store.num_kv_heads)
        heads = store.batch, query_heads
        most = sure + drawing.most_pairs(samples, query_heads // store.num_kv_heads, width * size)
        lists = drawing.PairLists.of(*rows, min(most, (width + 1) * size))
        self.lists = lists if counts is None else lists._replace(counts=counts)
        self.portion = np.ones(heads, np.float32)
        """fp32 `[B, Hq]`, the share of each head's attention that the pairs stand for; `launch` may write it."""
        errors = np.zeros(heads, np.float32)
        weights = Pairs.of(
            lists.weights, query_heads, skipped=skipped, portion=self.portion, errors=errors, tally=stats.errors
        )
        self.selection = Selection(self.lists.pairs, self.lists.counts, 2, weights)
        self._masses = buffer("masses of pairs", (*heads, drawing.kept_masses(width, size)), drawing.MASSES)

    def launch(
        self,
        query: np.ndarray,
        digest: Digest,
        listed: drawing.Always | drawing.Resident,
        scores: Scores,
        *,
        length: int = 0,
        limits: np.ndarray | None = None,
        unsealed: HostBlocks | None = None,
        tail: np.ndarray | None = None,
        kept: drawing.Kept | None = None,
    ) -> Launch:
        """Prepare the draw.

        Args:
            query, digest, listed, length, unsealed, tail, kept: as for `draw_pairs.draw_pairs`.
            scores: parameters of the model's scores.
            limits: those of the thresholds.
        """
        store, pairs = self.store, self.width * self.store.block_size // 2
        thresholds = drawing.Thresholds.of(self.stats.layer, store.padding.first, pairs, limits)
        return drawing.draw_pairs(
            query, digest, store.table, listed, thresholds, self._masses, self.lists, n_sealed=self.width,
            length=length, samples=self.samples, join=self.join, **scores._asdict(), unsealed=unsealed, tail=tail,
            kept=kept, tally=self.stats.drawn,
        )  # fmt: skip
