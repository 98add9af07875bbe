"""Block digests: summaries by which blocks are scored, built once when a block is full.

A `DigestStore` holds, builds and scores the digests of one layer, indexed by physical block. A block's score is its
**log mass**: for each query head an estimate of log Σ exp(score) over its valid tokens; −inf without valid tokens.
"""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_offload.blocks.device_mirror import sent
from hf_offload.blocks.memory import host_empty, memory_for
from hf_offload.cpu.kernels.digest_scores import Digest, Vectors, vectors
from hf_offload.cpu.kernels.submean_scores import SubMeans, submeans
from hf_offload.gpu.digest_scores import score_submeans, score_vectors
from hf_offload.gpu.seal import errors_of, pairs_of, seal_submeans, seal_vectors
from hf_offload.scores import Scores

STATISTICS_TOKENS = 1024
"""So many valid tokens a row holds at least when the statistics of its digests are made from what it holds."""
Tiles = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]
"""Gives the first tokens of all rows in pieces: keys `[B, Hkv, T, D]`, T even; validity `[B, T]`, bool on the host."""


@dataclass
class _Blocks:
    """What forks share: tensors by physical block, on the CPU as arrays, too."""

    capacity: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


class DigestStore(ABC):
    """The digests of one layer, indexed by physical block; tensors on the model's device.

    Forks of a cache share the blocks' digests, each with statistics of its own; a writer (`seal`, `reserve`, `copy`)
    holds `lock`.
    """

    frozen = True
    """Whether the statistics of the digest are fixed; `freeze` fixes them before the first `seal`."""

    @property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        """The float32 tensors that `freeze` makes, with their shapes behind the first axis, the rows."""
        return {}

    of_all_heads = ("bias",)
    """Names of the tensors that all KV heads of a block share."""
    sums = True
    """Whether masses of several blocks are joined by their sum, not by their maximum (as for bounds)."""
    of_query = False
    """Whether the result of `arrays` depends on the query (`fill`)."""

    def __init__(self, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device) -> None:
        self.num_kv_heads, self.head_dim, self.block_size, self.device = num_kv_heads, head_dim, block_size, device
        self.blocks = _Blocks()

    @property
    def capacity(self) -> int:
        """The number of physical blocks that there is room for."""
        return self.blocks.capacity

    @property
    def lock(self) -> threading.RLock:
        """Held by who writes the blocks' digests."""
        return self.blocks.lock

    def fork(self) -> DigestStore:
        """Return another store of the same blocks. Its statistics may become others: tensors are never written into."""
        return copy.copy(self)

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the statistics of the rows of an index `[B']`, in its order."""
        for name in self.statistics if self.frozen else ():
            setattr(self, name, getattr(self, name)[torch.from_numpy(rows.astype(np.int64)).to(self.device)])

    def crop(self, length: int) -> None:
        """Forget the statistics if so few tokens are left that digests begin again."""
        if length < STATISTICS_TOKENS:
            self.frozen = type(self).frozen

    @abstractmethod
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """For every tensor that has a block axis: its shape without that axis, and its dtype."""

    @abstractmethod
    def seal(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        """Build the digests of full blocks.

        Args:
            ids: `[n]`, physical blocks, equally many of each row, row by row.
            k: `[n, Hkv, block_size, D]`, their keys.
            valid: `[n, block_size]` bool, valid tokens.
        """

    def seal_from(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        """`seal` with keys on the model's device: digests of the host are built there and copied."""
        if k.device == self.device:
            self.seal(ids, k, valid)
            return
        made = type(self)(self.num_kv_heads, self.head_dim, self.block_size, k.device)
        made.reserve(len(ids))
        for name in self.statistics:
            setattr(made, name, getattr(self, name).to(k.device))
        made.seal(torch.arange(len(ids), device=k.device), k, valid)
        for name, digests in made.blocks.tensors.items():
            self.blocks.tensors[name][ids] = digests.to(self.device)

    def held(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the digests and their (fixed) statistics; a fork may replace them by larger ones."""
        return *self.blocks.tensors.values(), *(getattr(self, name) for name in self.statistics)

    @property
    @abstractmethod
    def identity(self) -> Any:
        """An object that changes identity whenever `arrays` returns other arrays, those of the query aside."""

    @abstractmethod
    def arrays(self, query: np.ndarray, scale: float, earlier: Digest | None = None) -> Digest:
        """The digest as CPU kernels take it (`digest_scores.Digest`).

        Args:
            query: `[B, Hq, D]` fp32.
            scale: softmax scale.
            earlier: an earlier result for a query of this shape, which may be overwritten and returned again.
        """

    def fill(self, earlier: Digest, query: np.ndarray, scale: float) -> None:
        """Update a result of `arrays` for another query."""
        raise TypeError(f"{type(self).__name__} scores every query with the same arrays")

    @abstractmethod
    def score(self, query: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Log masses on the digests' device.

        Args:
            query: `[B, Hq, D]` fp32.
            table: `[B, N]` int32, the physical block of each logical one.
            limits: int32 `[2]`, (length, sealed): blocks from `sealed` on get −inf.
            scores: scale and softcap of the model.

        Returns:
            `[B, Hq, N]` fp32.
        """

    def freeze(self, tiles: Tiles) -> None:
        """Fix the statistics of each row from its valid tokens, or, if it has few, from those of all rows."""
        raise TypeError(f"{type(self).__name__} has no statistics to fix")

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy digests from blocks `source` to blocks `target`; int `[n]`, physical blocks."""
        old, new = (torch.from_numpy(ids.astype(np.int64)).to(self.device) for ids in (source, target))
        with self.lock:
            for tensor in self.blocks.tensors.values():
                tensor[new] = tensor[old]

    def of_head(self, ids: np.ndarray, row: int, head: int, device: torch.device) -> DigestStore:
        """Copy the digests of a row's blocks `ids` (int `[n]`) for one KV head to a device; block i there is ids[i]."""
        part = type(self)(1, self.head_dim, self.block_size, device)
        index = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        with self.lock:
            for name, kept in self.blocks.tensors.items():
                values = kept[index] if name in self.of_all_heads else kept[index, head : head + 1]
                part.blocks.tensors[name] = values.to(device)
        for name in self.statistics:
            setattr(part, name, getattr(self, name)[row : row + 1, head : head + 1].to(device))
        part.frozen, part.blocks.capacity = self.frozen, len(ids)
        return part

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's digest."""
        return sum(math.prod(row) * dtype.itemsize for row, dtype in self.tensors().values())

    @property
    def nbytes(self) -> int:
        """Bytes of all digests that there is room for."""
        return self.capacity * self.block_bytes

    def reserve(self, blocks: int) -> None:
        """Make room for `blocks` physical blocks."""
        with self.lock:
            if blocks > self.capacity:
                self._grow(blocks)

    def _grow(self, blocks: int) -> None:
        what, lower = "digests", "a larger block_size, fewer rows or a shorter context need less"
        on_host, wide = self.device.type == "cpu", {}
        with torch.inference_mode(False), memory_for(what, lower, blocks * self.block_bytes):
            for name, (row, dtype) in self.tensors().items():
                shape = (blocks, *row)
                if on_host:
                    wide[name] = host_empty(shape, dtype, what=what, lower=lower)
                else:
                    wide[name] = torch.empty(shape, dtype=dtype, device=self.device)
                if self.capacity:
                    wide[name][: self.capacity] = self.blocks.tensors[name]
                wide[name][self.capacity :] = 0
        self.blocks.tensors |= wide  # replace all tensors or none
        if on_host:
            self.blocks.arrays |= {name: grown.numpy() for name, grown in wide.items()}
        self.blocks.capacity = blocks


class VectorStore(DigestStore):
    """Digests of one vector for each block and KV head, scored by its dot product with a transformed query."""

    width = 1  # vectors of head_dim in each block
    of_query = True

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "vectors": ((self.num_kv_heads, self.width * self.head_dim), torch.float32),
            "bias": ((), torch.float32),
        }

    @property
    def vectors(self) -> torch.Tensor:
        """`[P, Hkv, W]` fp32, by physical block."""
        return self.blocks.tensors["vectors"]

    @property
    def bias(self) -> torch.Tensor:
        """`[P]` fp32, added to the scores; −inf: no token counts."""
        return self.blocks.tensors["bias"]

    def _transform(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        return query * scale

    @property
    def identity(self) -> Any:
        return self.blocks.arrays.get("vectors")

    def arrays(self, query: np.ndarray, scale: float, earlier: Digest | None = None) -> Digest:
        arrays = self.blocks.arrays
        if isinstance(earlier, Vectors) and earlier.vectors is arrays["vectors"]:
            self.fill(earlier, query, scale)
            return earlier
        ready = self._transform(torch.from_numpy(query), scale).numpy()
        return vectors(ready, arrays["vectors"], arrays["bias"], dtype=torch.float32)

    def fill(self, earlier: Digest, query: np.ndarray, scale: float) -> None:
        assert isinstance(earlier, Vectors)
        np.copyto(earlier.query, self._transform(torch.from_numpy(query), scale).numpy())

    def score(self, query: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scores: Scores) -> torch.Tensor:
        ready = self._transform(query, scores.scale)
        return score_vectors(ready, self.vectors, self.bias, table, limits, softcap=scores.softcap)


class MeanStore(VectorStore):
    """The mean key of a block (the digest of MoBA)."""

    def seal(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        seal_vectors(ids, k, valid, self.vectors, self.bias, bounds=False)


class QuestStore(VectorStore):
    """The largest and smallest key per channel: an upper bound of q·k (Quest; ScoutAttention §3.2)."""

    width, sums = 2, False

    def seal(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        seal_vectors(ids, k, valid, self.vectors, self.bias, bounds=True)

    def _transform(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        query = query * scale
        return torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)


_NO_QUERY = np.empty(0, np.float32)
_FIRST_PAIRS = 512  # of a row, whose mean error counts as the usual one


class SubMeanStore(DigestStore):
    """Sub-means: pairs of consecutive keys, their mean in int4 and half their difference in 2 bits for each channel.

    The keys of pair j are μ_j ± δ_j, so that log mass = logsumexp over j of log(tokens in j) + scale·q·μ_j +
    log cosh(scale·q·δ_j); a softcap applies to the scores of both keys. Each pair has a scale. Channels are divided by
    the square root of their standard deviation, half way between equal relative and equal absolute rounding errors.
    Pairs that are missed by far more than others are marked as outliers (`seal_submeans`). Center, deviations and the
    usual error are each row's own; a row with fewer than `STATISTICS_TOKENS` takes those of all rows.
    """

    frozen = False
    bundle: Digest | None = None
    """The result of `arrays`; None: not made yet."""
    center: torch.Tensor
    sigma: torch.Tensor
    error: torch.Tensor

    @property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        channels = self.num_kv_heads, self.head_dim
        return {"center": channels, "sigma": channels, "error": channels[:1]}

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        heads, pairs = self.num_kv_heads, self.block_size // 2
        return {
            "codes": ((heads, pairs * self.head_dim // 2), torch.uint8),
            "levels": ((heads, self.head_dim // 16, pairs), torch.int32),
            "sizes": ((heads, pairs), torch.int32),
            "bias": ((pairs,), torch.float32),
        }

    def freeze(self, tiles: Tiles) -> None:
        total: Any = 0.0
        square: Any = 0.0
        number: Any = 0
        for mean, _, used in self._pairs(tiles):
            mean = torch.where(used[:, None, :, None], mean, 0).double()
            total, square, number = total + mean.sum(2), square + mean.square().sum(2), number + used.sum(1)
        few = (2 * number < STATISTICS_TOKENS)[:, None, None]
        total, square, number = (
            torch.where(few, x.sum(0), x) for x in (total, square, number.clamp(min=1)[:, None, None])
        )
        mean = total / number
        center = mean.float()
        sigma = (square / number - mean.square()).clamp(min=0).pow(0.25).float().clamp(min=1e-6)
        error: Any = 0.0
        number = 0
        for mean, half, used in self._pairs(tiles):
            used = used & (number + used.cumsum(1) <= _FIRST_PAIRS)
            error = error + errors_of(mean, half, center, sigma).where(used[:, None], 0).double().sum(2)
            number = number + used.sum(1, keepdim=True)
            if int(number.min()) >= _FIRST_PAIRS:
                break
        error, number = (torch.where(few[..., 0], x.sum(0), x) for x in (error, number))
        parts = center, sigma, (error / number.clamp(min=1)).float()
        self.center, self.sigma, self.error = (part.to(self.device) for part in parts)
        self.frozen, self.bundle = True, None

    def _pairs(self, tiles: Tiles) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Means and half differences `[B, Hkv, S, D]` of the pairs of each tile, and which `[B, S]` hold a token."""
        for k, valid in tiles():
            mean, half, count = pairs_of(k, sent(valid.numpy(), k.device))
            yield mean, half, count > 0

    def seal(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        each = len(ids) // len(self.center)
        statistics = (getattr(self, name).repeat_interleave(each, 0) for name in self.statistics)
        seal_submeans(ids, k, valid, *(self.blocks.tensors[name] for name in self.tensors()), *statistics)

    def select_rows(self, rows: np.ndarray) -> None:
        super().select_rows(rows)
        self.bundle = None

    @property
    def identity(self) -> Any:
        return self.arrays(_NO_QUERY, 1.0) if self.device.type == "cpu" else None

    def arrays(self, query: np.ndarray, scale: float, earlier: Digest | None = None) -> Digest:
        kept, bundle = self.blocks.arrays, self.bundle
        if not isinstance(bundle, SubMeans) or bundle.codes is not kept["codes"]:
            with self.lock:
                self.bundle = bundle = submeans(
                    kept["codes"], kept["levels"], kept["sizes"], kept["bias"], self.center.numpy(), self.sigma.numpy()
                )
        return bundle

    def score(self, query: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scores: Scores) -> torch.Tensor:
        kept = self.blocks.tensors
        return score_submeans(
            query, kept["codes"], kept["levels"], kept["sizes"], kept["bias"], self.center, self.sigma, table, limits,
            **scores._asdict(),
        )  # fmt: skip


DIGESTS: dict[str, type[DigestStore]] = {"submean": SubMeanStore, "quest": QuestStore, "mean": MeanStore}
