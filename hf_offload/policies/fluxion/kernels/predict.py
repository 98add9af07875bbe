"""What each query head needs of the host, predicted: the features of a step and the network, in one launch.

Method: Fluxion, section 5.2 and appendix A; `policies.fluxion.features` says what the columns are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.launch import F32, I32, U8, Array, Launch, jit, kernel, require
from hf_offload.cpu.memory import address_of, count_up, hold
from hf_offload.cpu.simd.vectors import fma, lane_sum, load_f32, splat

from .network import OUTPUTS, Network, run_network, scratch_floats

STEP_FEATURES = 11  # behind those that are fixed by the prompt
_CHUNK = 12  # query heads of a task: whole tiles of three and of four
_TILES: dict[int, tuple[int, ...]] = {3: (0, 0, 0), 4: (0, 0, 0, 0)}


class Known(NamedTuple):
    """What is known of a layer's prompt.

    Args:
        fixed: float32 [B, Hq, F − 11], features.
        directions: float32 [B, Hq, 2, D]: the host's mean key, times the softmax scale; the anchor query of length 1.
        half_variance: float32 [B, Hq].
    """

    fixed: Array
    directions: Array
    half_variance: Array


@jit
def _dot(x: int, y: int, dim: int) -> float:
    total = splat(np.float32(0.0))
    for d in range(0, 4 * dim, 64):
        total = fma(load_f32(x + d), load_f32(y + d), total)
    return lane_sum(total)  # type: ignore[no-any-return]


@jit
def _mixed_norm(x: int, y: int, share: float, dim: int) -> float:
    """The length of (1 − share) · x + share · y."""
    total, part, rest = splat(np.float32(0.0)), splat(np.float32(share)), splat(np.float32(1.0 - share))
    for d in range(0, 4 * dim, 64):
        mixed = fma(load_f32(y + d), part, load_f32(x + d) * rest)
        total = fma(mixed, mixed, total)
    return np.sqrt(lane_sum(total))  # type: ignore[no-any-return]


@jit
def count_tokens(valid: Array, ragged: bool, begin: int, first: int, end: int, length: int) -> tuple[int, int]:
    """Tokens of a row that count: of first..end-1, and all others below the length; begin: the first valid one."""
    if not ragged:
        return end - first, length - begin - (end - first)
    far = total = 0
    for t in range(length):
        total += valid[t] != 0
    for t in range(first, end):
        far += valid[t] != 0
    return far, total - far


@kernel
def predict_kernel(
    ticket: Array,
    tasks: int,
    heads: Any,
    network: Any,
    known: Any,
    query: Array,
    sink_out: Array,
    sink_lse: Array,
    near_out: Array,
    near_lse: Array,
    first: Array,
    end: int,
    begins: Array,
    valid: Array,
    ragged: bool,
    block_size: int,
    length: int,
    budget0: Array,
    slope: Array,
    streaming: Array,
) -> None:
    """One task = up to 12 query heads of one row."""
    query_heads, dim = query.shape[1], query.shape[2]
    fixed = known.fixed.shape[2]
    chunks, wide = (query_heads + _CHUNK - 1) // _CHUNK, len(network.offset)
    scratch = np.empty(scratch_floats(network, _CHUNK), np.float32)
    features = scratch[: _CHUNK * wide].reshape(_CHUNK, wide)
    out = np.empty((_CHUNK, OUTPUTS), np.float32)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        b, low = task // chunks, task % chunks * _CHUNK
        count = min(_CHUNK, query_heads - low)
        rows = (count + len(heads) - 1) // len(heads) * len(heads)
        host = min(max(first[b], 0), end)
        far, near = count_tokens(valid[b], ragged, begins[b], host * block_size, end * block_size, length)
        largest = np.float32(0.0)
        for h in range(query_heads):
            share = 1.0 / (1.0 + math.exp(float(sink_lse[b, h]) - float(near_lse[b, h])))
            norm = _mixed_norm(address_of(sink_out[b, h]), address_of(near_out[b, h]), share, dim)
            largest = np.float32(norm) if norm > largest or norm != norm else largest
        features[:rows] = 0.0
        for i in range(count):
            h, row = low + i, features[i]
            mine = address_of(query[b, h])
            norm = np.sqrt(_dot(mine, mine, dim))
            mean_key, anchor = address_of(known.directions[b, h, 0]), address_of(known.directions[b, h, 1])
            along, turned = _dot(mine, mean_key, dim), _dot(mine, anchor, dim)
            row[:fixed] = known.fixed[b, h]
            row[fixed], row[fixed + 1] = far, near
            row[fixed + 2] = norm
            row[fixed + 3] = np.sqrt(_dot(address_of(sink_out[b, h]), address_of(sink_out[b, h]), dim))
            row[fixed + 4] = np.sqrt(_dot(address_of(near_out[b, h]), address_of(near_out[b, h]), dim))
            row[fixed + 5] = largest
            row[fixed + 6], row[fixed + 7] = sink_lse[b, h], near_lse[b, h]
            row[fixed + 8] = along + known.half_variance[b, h] * norm * norm + np.float32(math.log(max(far, 1)))
            safe = max(norm, np.float32(1e-12))
            row[fixed + 9], row[fixed + 10] = along / safe, turned / safe
        run_network(network, heads, rows, fixed + STEP_FEATURES, address_of(scratch), out)
        for i in range(count):
            budget0[b, low + i], slope[b, low + i] = out[i, 0], out[i, 1]
            streaming[b, low + i] = out[i, 2] > network.threshold[0]
        count_up(ticket, 1)
    hold(scratch)
    hold(query)
    hold(sink_out)
    hold(near_out)
    hold(known.directions)


def predict_needs(
    network: Network,
    known: Known,
    query: Array,
    sinks: tuple[Array, Array],
    near: tuple[Array, Array],
    needs: tuple[Array, Array, Array],
    *,
    first: Array,
    end: int,
    begins: Array,
    valid: Array,
    ragged: bool,
    block_size: int,
    length: int,
) -> Launch:
    """Prepare the prediction of every query head's needs.

    Args:
        network: of F features.
        known: of the layer's prompt.
        query: float32 [B, Hq, D], D a multiple of 16.
        sinks, near: out float32 [B, Hq, D] and lse [B, Hq], natural log: attention to the first tokens, and to the
            newest; read when the launch runs.
        needs: budget0 and slope, float32 [B, Hq], and streaming, uint8 [B, Hq]: written.
        first: int32 [B], each row's first block on the host; end: where the host's blocks end.
        begins: int32 [B], each row's first valid token; valid: uint8 [B, T], 1 where a token counts.
        ragged: whether any token behind a row's first valid one may not count.
        block_size: tokens a block; length: tokens of a row.

    Raises:
        ValueError: shapes that contradict each other or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, heads, dim = query.shape
    if dim % 16:
        raise ValueError(f"head dimension {dim} is not a multiple of 16; pad the heads")
    require("query", query, F32, (batch, heads, dim))
    for name, (out, lse) in (("sinks", sinks), ("near", near)):
        require(f"{name} out", out, F32, (batch, heads, dim))
        require(f"{name} lse", lse, F32, (batch, heads))
    features = known.fixed.shape[-1] + STEP_FEATURES
    require("fixed", known.fixed, F32, (batch, heads, features - STEP_FEATURES))
    require("directions", known.directions, F32, (batch, heads, 2, dim))
    require("half_variance", known.half_variance, F32, (batch, heads))
    if network.first.shape[1] != features + 1:
        raise ValueError(f"a network of {network.first.shape[1] - 1} features does not serve {features}")
    for name, array in zip(("budget0", "slope"), needs, strict=False):
        require(name, array, F32, (batch, heads))
    require("streaming", needs[2], U8, (batch, heads))
    require("first", first, I32, (batch,))
    require("begins", begins, I32, (batch,))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    if not 0 <= end * block_size <= length <= valid.shape[1]:
        raise ValueError(f"{end} blocks of {block_size} and length {length}: valid covers {valid.shape[1]} tokens")
    three = -(-heads // 3) * 3 < -(-heads // 4) * 4
    tasks = batch * -(-heads // _CHUNK)
    args = (
        _TILES[3 if three else 4], network, known, query, *sinks, *near, first, int(end), begins, valid, bool(ragged),
        int(block_size), int(length), *needs,
    )  # fmt: skip
    return Launch(predict_kernel, tasks, args, tasks * network.nbytes)
