"""The features of a step, and the head property predictor: both in one launch for a decode step.

A small feed-forward network has two hidden layers with rectifiers and three outputs: bgt0, k, and the logit of
streaming. Between two layers of a model the caches are swept, so reading the weights is what a prediction costs; they
are float16, which changes predictions by far less than their error.
Source: Fluxion, section 5.2 and appendix A; `policies.fluxion.features` describes the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload.cpu.launch import F32, I32, U8, Array, Launch, jit, jit_for_python, kernel, require
from hf_offload.cpu.memory import LINE, address_of, count_up, hold, next_task, prefetch, put
from hf_offload.cpu.simd.register_tiles import load_columns, outer_fma, spread, store_tile, zeros
from hf_offload.cpu.simd.vectors import LANES, choose_less, fma, lane_sum, load_f32, splat, store, vmax

OUTPUTS = 3
STEP_FEATURES = 11  # behind those that are fixed by the prompt
_COLUMNS = 32  # of a layer that are computed together: their weights stay in the nearest cache
_AHEAD = 24  # cache lines to prefetch; a line holds an input's weights of 32 nodes
_HALVES = np.empty(0, np.int16)
_CHUNK = 12  # query heads of a task: whole tiles of three and of four
_TILES: dict[int, tuple[int, ...]] = {3: (0, 0, 0), 4: (0, 0, 0, 0)}


# --- the network -----------------------------------------------------------------------------------------------------


class Network(NamedTuple):
    """Weights of a network with two hidden layers of width W, rounded up to W' with nodes that are always 0.

    Args:
        offset, inverse: float32 [F'], a feature is standardised to offset + feature · inverse; F' is F + 1 rounded up
            to 16.
        low, high: float32 [F'], bounds of a standardised feature.
        first: float16 as int16 [W' / 32, F + 1, 32], weights of 32 nodes at a time, input by input; the last one is the
            bias.
        second: float16 as int16 [W' / 32, W' + 1, 32].
        outputs: float32 [3, W']; bias: float32 [3].
        threshold: float32 [1], the third output above which a head counts as streaming.
    """

    offset: Array
    inverse: Array
    low: Array
    high: Array
    first: Array
    second: Array
    outputs: Array
    bias: Array
    threshold: Array

    @property
    def nbytes(self) -> int:
        """Bytes that are read for a prediction."""
        return sum(part.nbytes for part in self)


def pack_network(
    standard: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
    threshold: float,
) -> Network:
    """Lay out a network for `run_network`.

    Args:
        standard: offset, inverse, low and high, `[F]` each.
        first, second, outputs: weight `[out, in]` and bias `[out]`, as torch's `Linear` has them.
        threshold: of the third output.

    Raises:
        ValueError: shapes that contradict each other, or weights beyond the range of float16.
    """
    count, width = standard[0].shape[0], first[0].shape[0]
    shapes = [tuple(weight.shape) for weight, _ in (first, second, outputs)]
    if shapes != [(width, count), (width, width), (OUTPUTS, width)]:
        raise ValueError(f"weights of shapes {shapes} are no network of {count} features, two layers and 3 outputs")
    padded = -(-width // _COLUMNS) * _COLUMNS
    wide = -(-(count + 1) // LANES) * LANES
    offset, inverse, low, high = (_room(wide, part) for part in standard)
    last = _room(OUTPUTS, padded)
    last[:, :width] = outputs[0].detach().float().cpu().numpy()
    return Network(
        offset, inverse, low, high, _columns(*first, count, padded), _columns(*second, padded, padded), last,
        _room(OUTPUTS, outputs[1]), np.array([threshold], np.float32),
    )  # fmt: skip


def _room(*shape: Any) -> Array:
    """Zeros, aligned to a cache line; a tensor `[n]` as the last size is copied to their front."""
    given = shape[-1] if isinstance(shape[-1], torch.Tensor) else None
    with torch.inference_mode(False):
        zeros: Array = torch.zeros(shape if given is None else shape[:-1], dtype=torch.float32, device="cpu").numpy()
    if given is not None:
        zeros[: len(given)] = given.detach().float().cpu().numpy()
    return zeros


def _columns(weight: torch.Tensor, bias: torch.Tensor, inputs: int, padded: int) -> Array:
    wide = np.zeros((padded, inputs + 1), np.float32)
    wide[: weight.shape[0], : weight.shape[1]] = weight.detach().float().cpu().numpy()
    wide[: len(bias), -1] = bias.detach().float().cpu().numpy()
    columns = _room(padded // _COLUMNS, inputs + 1, _COLUMNS // 2).view(np.int16)  # the memory of two is one float's
    with np.errstate(over="ignore"):
        halves = wide.astype(np.float16).view(np.int16)
    columns[:] = halves.reshape(padded // _COLUMNS, _COLUMNS, inputs + 1).transpose(0, 2, 1)
    if not np.isfinite(columns.view(np.float16)).all():
        raise ValueError("the network has weights that are no float16; train it with standardised features")
    return columns


@jit
def _layer(heads: Any, rows: int, weights: Array, source: int, stride: int, target: int, out_stride: int) -> None:
    """The rectified outputs of a layer, whose inputs end with a 1; strides in bytes, whole tiles of rows."""
    tiles, inputs = weights.shape[0], weights.shape[1]
    zero = splat(np.float32(0.0))
    for column in range(tiles):
        base = address_of(weights) + column * inputs * LINE
        for row in range(0, rows, len(heads)):
            tile = zeros(heads, 2)
            address = source + row * stride
            for i in range(inputs):
                if row == 0:
                    prefetch(base + (i + _AHEAD) * LINE, 1)
                tile = outer_fma(
                    tile, load_columns(_HALVES, base + i * LINE, 2), spread(address + 4 * i, stride, heads)
                )
            store_tile(target + row * out_stride + 4 * column * _COLUMNS, out_stride, heads, tile)
    for row in range(rows):
        for column in range(0, 4 * tiles * _COLUMNS, 64):
            at = target + row * out_stride + column
            store(at, vmax(zero, load_f32(at)))  # in this order NaN stays NaN
        put(target + row * out_stride + 4 * tiles * _COLUMNS, np.float32(1.0))


@jit
def scratch_floats(network: Any, rows: int) -> int:
    """Floats of `run_network`'s scratch for `rows` rows: features and both layers."""
    return int(rows * (len(network.offset) + 2 * (network.outputs.shape[1] + LANES)) + LANES)


@jit
def run_network(network: Any, heads: Any, rows: int, count: int, scratch: int, out: Array) -> None:
    """Run the network for some rows of features.

    Args:
        network: a `Network` of F features.
        heads: tag of the rows in registers at once (`launch.head_tiles`).
        rows: how many, whole tiles of them.
        count: F.
        scratch: address of float32 [rows, F'], the features, and room for the layers; used up.
        out: float32 [rows, 3], written.
    """
    wide, width = len(network.offset), network.outputs.shape[1]
    stride, hidden = 4 * wide, 4 * (width + LANES)
    for row in range(rows):
        for i in range(0, 4 * wide, 64):
            at = scratch + row * stride + i
            x = fma(load_f32(at), load_f32(address_of(network.inverse) + i), load_f32(address_of(network.offset) + i))
            low, high = load_f32(address_of(network.low) + i), load_f32(address_of(network.high) + i)
            x = vmax(low, x)
            store(at, choose_less(high, x, high, x))
        put(scratch + row * stride + 4 * count, np.float32(1.0))
    one = scratch + rows * stride
    two = one + rows * hidden
    _layer(heads, rows, network.first, scratch, stride, one, hidden)
    _layer(heads, rows, network.second, one, hidden, two, hidden)
    for row in range(rows):
        for i in range(OUTPUTS):
            total = splat(np.float32(0.0))
            weights = address_of(network.outputs) + 4 * i * width
            for at in range(0, 4 * width, 64):
                total = fma(load_f32(two + row * hidden + at), load_f32(weights + at), total)
            out[row, i] = lane_sum(total) + network.bias[i]


# --- the features of a step, and the launch --------------------------------------------------------------------------


class PromptArrays(NamedTuple):
    """`features.PromptStatistics` of a layer as arrays.

    Args:
        fixed: float32 [B, Hq, F − 11], features.
        directions: float32 [B, Hq, 2, D]: the host's mean key, times the softmax scale; the anchor query of length 1.
        half_variance: float32 [B, Hq].
    """

    fixed: Array
    directions: Array
    half_variance: Array


class Rows(NamedTuple):
    """Where the tokens of each row are.

    Args:
        first: int32 [B], the first block on the host; end: where the host's blocks end, in every row.
        begins: int32 [B], the first valid token.
        valid: uint8 [B, T], 1 where a token counts.
        ragged: 1 if any token behind a row's first valid one may not count, or 0.
        block_size: tokens of a block.
    """

    first: Array
    end: int
    begins: Array
    valid: Array
    ragged: int
    block_size: int


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


@jit_for_python
def count_tokens(valid: Array, ragged: int, begin: int, first: int, end: int, length: int) -> tuple[int, int]:
    """Valid tokens of a row: those of first..end-1, and all others below `length`; begin: the first valid one."""
    if not ragged:
        return end - first, length - begin - (end - first)
    host = total = 0
    for t in range(length):
        total += valid[t] != 0
    for t in range(first, end):
        host += valid[t] != 0
    return host, total - host


@jit_for_python
def write_features(
    prompt: Any, query: Array, sinks: Any, local: Any, lengths: tuple[int, int], b: int, first: int, features: Array
) -> None:
    """Write the features of some heads of a row, as `features.FEATURES` names them.

    Args:
        prompt, query, sinks, local: as in `predict_properties`.
        lengths: valid tokens of row b, on the host and on the device.
        first: the first of the heads.
        features: float32 [heads, F], written.
    """
    (sink_out, sink_lse), (local_out, local_lse), (host, others) = sinks, local, lengths
    dim, fixed, largest = query.shape[2], prompt.fixed.shape[2], np.float32(0.0)
    for h in range(query.shape[1]):
        share = 1.0 / (1.0 + math.exp(float(sink_lse[b, h]) - float(local_lse[b, h])))
        norm = _mixed_norm(address_of(sink_out[b, h]), address_of(local_out[b, h]), share, dim)
        largest = np.float32(norm) if norm > largest or norm != norm else largest
    for i in range(len(features)):
        h, row = first + i, features[i]
        head_query = address_of(query[b, h])
        norm = np.sqrt(_dot(head_query, head_query, dim))
        mean_key, anchor = address_of(prompt.directions[b, h, 0]), address_of(prompt.directions[b, h, 1])
        along, turned = _dot(head_query, mean_key, dim), _dot(head_query, anchor, dim)
        row[:fixed] = prompt.fixed[b, h]
        row[fixed], row[fixed + 1] = host, others
        row[fixed + 2] = norm
        row[fixed + 3] = np.sqrt(_dot(address_of(sink_out[b, h]), address_of(sink_out[b, h]), dim))
        row[fixed + 4] = np.sqrt(_dot(address_of(local_out[b, h]), address_of(local_out[b, h]), dim))
        row[fixed + 5] = largest
        row[fixed + 6], row[fixed + 7] = sink_lse[b, h], local_lse[b, h]
        row[fixed + 8] = along + prompt.half_variance[b, h] * norm * norm + np.float32(math.log(max(host, 1)))
        safe = max(norm, np.float32(1e-12))
        row[fixed + 9], row[fixed + 10] = along / safe, turned / safe


@kernel
def predict_kernel(
    ticket: Array, tasks: int, heads: Any, network: Any, prompt: Any, query: Array, sinks: Any, local: Any, rows: Any,
    length: int, properties: Any,
) -> None:  # fmt: skip
    """One task = up to 12 query heads of one row."""
    (budget0, slope, streaming), query_heads, size, end = properties, query.shape[1], rows.block_size, rows.end
    chunks, wide = (query_heads + _CHUNK - 1) // _CHUNK, len(network.offset)
    scratch = np.empty(scratch_floats(network, _CHUNK), np.float32)
    features = scratch[: _CHUNK * wide].reshape(_CHUNK, wide)
    out = np.empty((_CHUNK, OUTPUTS), np.float32)
    task = count_up(ticket, 0)
    while task < tasks:
        b, low = task // chunks, task % chunks * _CHUNK
        count = min(_CHUNK, query_heads - low)
        tiled = (count + len(heads) - 1) // len(heads) * len(heads)
        first = min(max(rows.first[b], 0), end) * size
        host, others = count_tokens(rows.valid[b], rows.ragged, rows.begins[b], first, end * size, length)
        features[:tiled] = 0.0
        write_features(prompt, query, sinks, local, (host, others), b, low, features[:count])
        run_network(network, heads, tiled, prompt.fixed.shape[2] + STEP_FEATURES, address_of(scratch), out)
        for i in range(count):
            budget0[b, low + i], slope[b, low + i] = out[i, 0], out[i, 1]
            streaming[b, low + i] = out[i, 2] > network.threshold[0]
        task = next_task(ticket)
    hold(scratch)


def step_features(
    prompt: PromptArrays, query: Array, sinks: tuple[Array, Array], local: tuple[Array, Array],
    lengths: Sequence[tuple[int, int]],
) -> Array:  # fmt: skip
    """The features of every head at a decode step, float32 [B, Hq, F]; columns as in `features.FEATURES`.

    Args:
        prompt, query, sinks, local: as in `predict_properties`.
        lengths: valid tokens of each row, on the host and on the device.

    Raises:
        ValueError, TypeError: as in `predict_properties`.
    """
    features = np.empty((*query.shape[:2], _check_step(prompt, query, sinks, local)), np.float32)
    for b, row in enumerate(lengths):
        write_features(prompt, query, sinks, local, row, b, 0, features[b])
    return features


def _check_step(prompt: PromptArrays, query: Array, sinks: tuple[Array, Array], local: tuple[Array, Array]) -> int:
    """Check arguments of `predict_properties`; the number of features."""
    batch, heads, dim = query.shape
    if dim % 16:
        raise ValueError(f"head dimension {dim} is not a multiple of 16; pad the heads")
    require("query", query, F32, (batch, heads, dim))
    for name, (out, lse) in (("sinks", sinks), ("local", local)):
        require(f"{name} out", out, F32, (batch, heads, dim))
        require(f"{name} lse", lse, F32, (batch, heads))
    fixed = int(prompt.fixed.shape[-1])
    require("fixed", prompt.fixed, F32, (batch, heads, fixed))
    require("directions", prompt.directions, F32, (batch, heads, 2, dim))
    require("half_variance", prompt.half_variance, F32, (batch, heads))
    return fixed + STEP_FEATURES


def predict_properties(
    network: Network, prompt: PromptArrays, query: Array, sinks: tuple[Array, Array], local: tuple[Array, Array],
    rows: Rows, properties: tuple[Array, Array, Array], *, length: int,
) -> Launch:  # fmt: skip
    """Prepare the prediction of every query head's properties (bgt0, k, streaming).

    Args:
        network: of F features.
        prompt: of the layer.
        query: float32 [B, Hq, D], D a multiple of 16.
        sinks, local: out float32 [B, Hq, D] and lse [B, Hq], natural log: attention to the first tokens, and to the
            newest; read when the launch runs.
        rows: where the tokens are.
        properties: budget0 and slope, float32 [B, Hq], and streaming, uint8 [B, Hq]: written.
        length: tokens of a row.

    Raises:
        ValueError: shapes that contradict each other or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    features, (batch, heads, _) = _check_step(prompt, query, sinks, local), query.shape
    if network.first.shape[1] != features + 1:
        raise ValueError(f"a network of {network.first.shape[1] - 1} features does not serve {features}")
    for name, array in zip(("budget0", "slope"), properties, strict=False):
        require(name, array, F32, (batch, heads))
    require("streaming", properties[2], U8, (batch, heads))
    end, size, valid = rows.end, rows.block_size, rows.valid
    require("first", rows.first, I32, (batch,))
    require("begins", rows.begins, I32, (batch,))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    if not 0 <= end * size <= length <= valid.shape[1]:
        raise ValueError(f"{end} blocks of {size} and length {length}: valid covers {valid.shape[1]} tokens")
    three = -(-heads // 3) * 3 < -(-heads // 4) * 4
    tasks = batch * -(-heads // _CHUNK)
    tiles = _TILES[3 if three else 4]
    args = (tiles, network, prompt, query, tuple(sinks), tuple(local), rows, int(length), properties)
    return Launch(predict_kernel, tasks, args, tasks * network.nbytes)
