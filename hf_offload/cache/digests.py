"""Block digests: summaries by which blocks are scored, built once when a block is full.

A `DigestStore` holds, builds and scores the digests of one layer, indexed by physical block. A block's score is its
**log mass**: for each query head an estimate of log Σ exp(score) over its valid tokens; −inf without valid tokens.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_offload.cache.device_mirror import sent
from hf_offload.cache.memory import host_empty, memory_for
from hf_offload.cpu.kernels.digest_scores import Digest, Vectors, vectors
from hf_offload.cpu.kernels.submean_scores import submeans
from hf_offload.gpu.digest_scores import score_submeans, score_vectors
from hf_offload.gpu.seal import errors_of, pairs_of, seal_submeans, seal_vectors
from hf_offload.scores import Scores


class DigestStore(ABC):
    """The digests of one layer, indexed by physical block; tensors on the model's device.

    Forks of a cache share them; a writer (`freeze`, `seal`, `reserve`, `copy`) holds `lock`.
    """

    frozen = True
    """Whether the statistics of the digest are fixed; `freeze` fixes them before the first `seal`."""

    @property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        """The float32 tensors that `freeze` makes, with their shapes; the first axis is KV heads."""
        return {}

    of_all_heads = ("bias",)
    """Names of the tensors that all KV heads of a block share."""
    sums = True
    """Whether masses of several blocks are joined by their sum, not by their maximum (as for bounds)."""
    of_query = False
    """Whether the result of `arrays` depends on the query (`fill`)."""

    def __init__(self, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device) -> None:
        self.num_kv_heads, self.head_dim, self.block_size, self.device = num_kv_heads, head_dim, block_size, device
        self.capacity = 0
        self.lock = threading.RLock()
        self._arrays: dict[str, np.ndarray] = {}

    @abstractmethod
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """For every tensor that has a block axis: its shape without that axis, and its dtype."""

    @abstractmethod
    def seal(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        """Build the digests of full blocks.

        Args:
            ids: `[n]`, physical blocks.
            k: `[n, Hkv, block_size, D]`, their keys.
            valid: `[n, block_size]` bool, valid tokens.
        """

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return (*self.tensors(), *self.statistics)

    def held(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the digests and their (fixed) statistics; a fork may replace them by larger ones."""
        return tuple([getattr(self, name) for name in self._names])

    @property
    @abstractmethod
    def identity(self) -> Any:
        """An object that changes identity whenever `arrays` returns other arrays, those of the query aside."""

    @abstractmethod
    def arrays(self, query: np.ndarray, scale: float, known: Digest | None = None) -> Digest:
        """The digest as CPU kernels take it (`digest_scores.Digest`).

        Args:
            query: `[B, Hq, D]` fp32.
            scale: softmax scale.
            known: an earlier result for a query of this shape, which may be overwritten and returned again.
        """

    def fill(self, known: Digest, query: np.ndarray, scale: float) -> None:
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

    def freeze(self, tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fix the statistics from tiles of keys `[B, Hkv, T, D]` and validity `[B, T]` (bool, on the host)."""
        raise TypeError(f"{type(self).__name__} has no statistics to fix")

    def thaw(self) -> None:
        """Let the statistics be fixed again, by another text; call it when no block has a digest."""
        self.frozen = type(self).frozen

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy digests from blocks `source` to blocks `target`; int `[n]`, physical blocks."""
        old, new = (torch.from_numpy(ids.astype(np.int64)).to(self.device) for ids in (source, target))
        with self.lock:
            for name in self.tensors():
                tensor = getattr(self, name)
                tensor[new] = tensor[old]

    def of_head(self, ids: np.ndarray, head: int, device: torch.device) -> DigestStore:
        """Copy one KV head's digests of blocks `ids` (int `[n]`) to a device, in a store whose block i is ids[i]."""
        part = type(self)(1, self.head_dim, self.block_size, device)
        index = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        with self.lock:
            for name in self.tensors():
                kept = getattr(self, name)
                mine = kept[index] if name in self.of_all_heads else kept[index, head : head + 1]
                setattr(part, name, mine.to(device))
            for name in self.statistics:
                setattr(part, name, getattr(self, name)[head : head + 1].to(device))
        part.frozen, part.capacity = self.frozen, len(ids)
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
                    wide[name][: self.capacity] = getattr(self, name)
                wide[name][self.capacity :] = 0
        for name, grown in wide.items():  # replace all tensors or none
            setattr(self, name, grown)
            if on_host:
                self._arrays[name] = grown.numpy()
        self.capacity = blocks


class VectorStore(DigestStore):
    """Digests of one vector for each block and KV head, scored by its dot product with a transformed query."""

    width = 1  # vectors of head_dim in each block
    of_query = True

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "vectors": ((self.num_kv_heads, self.width * self.head_dim), torch.float32),
            "bias": ((), torch.float32),
        }

    vectors: torch.Tensor
    bias: torch.Tensor

    def _transform(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        return query * scale

    @property
    def identity(self) -> Any:
        return self._arrays.get("vectors")

    def arrays(self, query: np.ndarray, scale: float, known: Digest | None = None) -> Digest:
        if isinstance(known, Vectors) and known.vectors is self._arrays["vectors"]:
            self.fill(known, query, scale)
            return known
        ready = self._transform(torch.from_numpy(query), scale).numpy()
        return vectors(ready, self._arrays["vectors"], self._arrays["bias"], dtype=torch.float32)

    def fill(self, known: Digest, query: np.ndarray, scale: float) -> None:
        assert isinstance(known, Vectors)
        np.copyto(known.query, self._transform(torch.from_numpy(query), scale).numpy())

    def score(self, query: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scores: Scores) -> torch.Tensor:
        return score_vectors(
            self._transform(query, scores.scale), self.vectors, self.bias, table, limits, softcap=scores.softcap
        )


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
_FIRST_PAIRS = 512  # whose mean error counts as the usual one


class SubMeanStore(DigestStore):
    """Sub-means: pairs of consecutive keys, their mean in int4 and half their difference in 2 bits for each channel.

    The keys of pair j are μ_j ± δ_j, so that log mass = logsumexp over j of log(tokens in j) + scale·q·μ_j +
    log cosh(scale·q·δ_j); a softcap applies to the scores of both keys. Each pair has a scale. Channels are divided by
    the square root of their standard deviation, half way between equal relative and equal absolute rounding errors.
    Pairs that are missed by far more than others are marked as outliers (`seal_submeans`).
    """

    frozen = False
    bundle: Digest | None = None
    """The result of `arrays`; None: not made yet."""
    codes: torch.Tensor
    levels: torch.Tensor
    sizes: torch.Tensor
    bias: torch.Tensor

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

    def freeze(self, tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        total = torch.zeros(self.num_kv_heads, self.head_dim, dtype=torch.float64, device=self.device)
        square, number, first, room = total.clone(), 0, [], _FIRST_PAIRS
        for k, valid in _even(tiles):
            live = valid.view(len(valid), -1, 2).any(-1)
            number += int(live.sum())
            means, half, count = pairs_of(k, sent(valid.numpy(), self.device))
            used = (count > 0)[:, None, :, None]
            if room:
                some = live.any(0).nonzero().view(-1)[:room]  # whatever the size of the tiles
                room -= len(some)
                there = some.to(self.device)
                first.append((means[:, :, there], half[:, :, there], live[:, some].to(self.device)))
            total += torch.where(used, means, 0).double().sum((0, 2))
            square += torch.where(used, means, 0).double().square().sum((0, 2))
        center = total / max(number, 1)
        self.center = center.float()
        variance = (square / max(number, 1) - center.square()).clamp(min=0)
        self.sigma = variance.pow(0.25).float().clamp(min=1e-6)
        errors = [errors_of(means, half, self.center, self.sigma).transpose(1, 2)[live] for means, half, live in first]
        self.error = torch.cat(errors).mean(0)
        self.frozen = number > 0  # blocks of padding alone have no statistics
        self.bundle = None

    def seal(self, ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> None:
        kept = (self.codes, self.levels, self.sizes, self.bias)
        seal_submeans(ids, k, valid, *kept, self.center, self.sigma, self.error)

    def _grow(self, blocks: int) -> None:
        self.bundle = None
        super()._grow(blocks)

    @property
    def identity(self) -> Any:
        if self.bundle is not None:
            return self.bundle
        return self.arrays(_NO_QUERY, 1.0) if self.frozen and self.device.type == "cpu" else None

    def arrays(self, query: np.ndarray, scale: float, known: Digest | None = None) -> Digest:
        with self.lock:
            if self.bundle is None:
                kept, center, sigma = self._arrays, self.center.numpy(), self.sigma.numpy()
                self.bundle = submeans(kept["codes"], kept["levels"], kept["sizes"], kept["bias"], center, sigma)
            return self.bundle

    def score(self, query: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scores: Scores) -> torch.Tensor:
        return score_submeans(
            query,
            self.codes,
            self.levels,
            self.sizes,
            self.bias,
            self.center,
            self.sigma,
            table,
            limits,
            **scores._asdict(),
        )


def _even(tiles: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tiles, cut to an even number of tokens."""
    for k, valid in tiles:
        keep = k.shape[2] // 2 * 2
        yield k[:, :, :keep], valid[:, :keep]


DIGESTS: dict[str, type[DigestStore]] = {"submean": SubMeanStore, "quest": QuestStore, "mean": MeanStore}
