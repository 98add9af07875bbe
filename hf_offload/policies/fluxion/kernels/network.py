"""A small feed-forward network as compiled code wants it: two layers that end in a rectifier, and three outputs.

Between two layers of a model all caches are swept, so that the time to read the network's weights is what it costs.
They are kept as float16: what that loses is a hundredth of what a prediction is worth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload.cpu.launch import Array, jit
from hf_offload.cpu.memory import LINE, address_of, hold, prefetch, put
from hf_offload.cpu.simd.register_tiles import load_columns, outer_fma, spread, store_tile, zeros
from hf_offload.cpu.simd.vectors import LANES, choose_less, fma, lane_sum, load_f32, splat, store, vmax

OUTPUTS = 3
_COLUMNS = 32  # of a layer that are computed together: their weights stay in the nearest cache
_AHEAD = 24  # cache lines that are asked for before they are wanted; a line holds an input's weights of 32 nodes
_HALVES = np.empty(0, np.int16)


class Network(NamedTuple):
    """A network of width W, rounded up to W' with nodes that are always 0.

    Args:
        offset, inverse: float32 [F'], a feature counts as offset + feature · inverse; F' is F + 1 rounded up to 16.
        low, high: float32 [F'], but as no less and no more than this.
        first: float16 as int16 [W' / 32, F + 1, 32], weights of 32 nodes at a time, input by input; the last one is the
            bias.
        second: float16 as int16 [W' / 32, W' + 1, 32].
        outputs: float32 [3, W']; bias: float32 [3].
        threshold: of the third output, float32 [1]: from where on it means yes.
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
    """Zeros on a cache line; where the last of the sizes is a tensor `[n]`, that one at their front."""
    given = shape[-1] if isinstance(shape[-1], torch.Tensor) else None
    with torch.inference_mode(False):
        found: Array = torch.zeros(shape if given is None else shape[:-1]).numpy()
    if given is not None:
        found[: len(given)] = given.detach().float().cpu().numpy()
    return found


def _columns(weight: torch.Tensor, bias: torch.Tensor, inputs: int, padded: int) -> Array:
    wide = np.zeros((padded, inputs + 1), np.float32)
    wide[: weight.shape[0], : weight.shape[1]] = weight.detach().float().cpu().numpy()
    wide[: len(bias), -1] = bias.detach().float().cpu().numpy()
    found = _room(padded // _COLUMNS, inputs + 1, _COLUMNS // 2).view(np.int16)  # the memory of two is one float's
    with np.errstate(over="ignore"):
        halves = wide.astype(np.float16).view(np.int16)
    found[:] = halves.reshape(padded // _COLUMNS, _COLUMNS, inputs + 1).transpose(0, 2, 1)
    if not np.isfinite(found.view(np.float16)).all():
        raise ValueError("the network has weights that are no float16; train it with standardised features")
    return found


@jit
def _layer(heads: Any, rows: int, weights: Array, source: int, stride: int, target: int, out_stride: int) -> None:
    """The rectified outputs of a layer, whose inputs end with a 1; strides in bytes, whole tiles of rows."""
    tiles, inputs = weights.shape[0], weights.shape[1]
    zero = splat(np.float32(0.0))
    for column in range(tiles):
        base = address_of(weights) + column * inputs * LINE
        for row in range(0, rows, len(heads)):
            tile = zeros(heads, 2)
            place = source + row * stride
            for i in range(inputs):
                if row == 0:
                    prefetch(base + (i + _AHEAD) * LINE, 1)
                tile = outer_fma(tile, load_columns(_HALVES, base + i * LINE, 2), spread(place + 4 * i, stride, heads))
            store_tile(target + row * out_stride + 4 * column * _COLUMNS, out_stride, heads, tile)
    for row in range(rows):
        for column in range(0, 4 * tiles * _COLUMNS, 64):
            at = target + row * out_stride + column
            store(at, vmax(zero, load_f32(at)))  # in this order NaN stays NaN
        put(target + row * out_stride + 4 * tiles * _COLUMNS, np.float32(1.0))
    hold(weights)


@jit
def scratch_floats(network: Any, rows: int) -> int:
    """Floats that `run_network` wants for so many rows: features and both layers."""
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
    hold(network.outputs)
    hold(network.offset)
    hold(network.inverse)
    hold(network.low)
    hold(network.high)
