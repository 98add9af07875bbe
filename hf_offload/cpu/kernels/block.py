"""Attention of one group of query heads to one KV block: scores, online-softmax step, weighted sum.

All arguments are addresses. K or V of a block is `[block_size, D]` in the pool's dtype. Scores are float32 rows, one
for each query head, `stride` bytes apart, with one entry for each token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_offload.cpu.launch import Array, borrowing, jit
from hf_offload.cpu.memory import LINE, get, prefetch, put
from hf_offload.cpu.simd.register_tiles import (
    dot_quad,
    load_columns,
    load_tile,
    outer_fma,
    spread,
    store_quads,
    store_tile,
)
from hf_offload.cpu.simd.vectors import (
    MASKED,
    NOTHING,
    bend,
    choose_less,
    exp,
    lane_max,
    lane_sum,
    load_f32,
    splat,
    store,
    vmax,
)

# Tokens of one softmax step: enough to fill vectors when blocks are small.
STEP_TOKENS = 128


@jit
def score_block(
    tag: Any, heads: Any, keys: int, ahead: int, query: int, dim: int, block_size: int, scores: int, stride: int
) -> None:
    """scores[head, token] = query[head] . keys[token]; also prefetch half of the record at `ahead` (0: none).

    K and V of a record are prefetched side by side, as two streams: the first half of each here, the second half in
    `add_weighted`. That is a fifth faster than one stream after the other.
    """
    row = dim * tag.itemsize
    for token in range(0, block_size, 4):
        first = keys + token * row
        if ahead != 0:
            for line in range(0, 2 * row, LINE):
                prefetch(ahead + token * row // 2 + line, 2)
                prefetch(ahead + (block_size + token // 2) * row + line, 2)
        sums = dot_quad(tag, heads, (first, first + row, first + 2 * row, first + 3 * row), query, dim)
        store_quads(scores + 4 * token, stride, heads, sums)


@jit
def soften_scores(count: int, scores: int, stride: int, tokens: int, cap: float) -> None:
    """score = cap * tanh(score / cap), in place, for `count` heads."""
    for head in range(count):
        for token in range(0, tokens, 16):
            address = scores + head * stride + 4 * token
            store(address, bend(load_f32(address), cap))


@borrowing
def mask_scores(count: int, scores: int, stride: int, valid: Array, first: int, filled: int, block_size: int) -> None:
    """Write MASKED for the tokens of a block that are unfilled or invalid; `first`: position of its first token."""
    for token in range(block_size):
        if token >= filled or valid[first + token] == 0:
            for head in range(count):
                put(scores + head * stride + 4 * token, MASKED)


@jit
def clear_scores(count: int, scores: int, stride: int, begin: int, end: int) -> None:
    """Write MASKED for tokens begin..end-1."""
    for head in range(count):
        for token in range(begin, end):
            put(scores + head * stride + 4 * token, MASKED)


@jit
def copy_scores(count: int, scores: int, stride: int, tokens: int, target: int, target_stride: int) -> None:
    """target[head, token] = score, -inf where it is MASKED; nothing is written after the last token."""
    nothing, none = splat(NOTHING), splat(np.float32(-np.inf))
    whole = tokens & ~15
    for head in range(count):
        row, to = scores + head * stride, target + head * target_stride
        for token in range(0, whole, 16):
            score = load_f32(row + 4 * token)
            store(to + 4 * token, choose_less(score, nothing, none, score))
        for token in range(whole, tokens):
            score = get(row + 4 * token)
            put(to + 4 * token, np.float32(-np.inf) if score < NOTHING else score)


@jit
def softmax_step(count: int, scores: int, stride: int, tokens: int, peaks: int, masses: int, fades: int) -> None:
    """One online-softmax step: turn scores into weights exp(score - peak), and update each head's peak and mass.

    `fades` receives exp(old peak - new peak), by which sums over earlier tokens must be multiplied.
    """
    for head in range(count):
        row = scores + head * stride
        old = get(peaks + 4 * head)
        peak = splat(old)
        for token in range(0, tokens, 16):
            peak = vmax(peak, load_f32(row + 4 * token))
        new = lane_max(peak)
        peak = splat(new)
        total = splat(np.float32(0.0))
        for token in range(0, tokens, 16):
            weight = exp(load_f32(row + 4 * token) - peak)
            total = total + weight
            store(row + 4 * token, weight)
        fade = lane_max(exp(splat(old) - peak))
        put(peaks + 4 * head, new)
        put(masses + 4 * head, get(masses + 4 * head) * fade + lane_sum(total))
        put(fades + 4 * head, fade)


@jit
def bend_weights(count: int, scores: int, bent: int, stride: int, tokens: int, cap: float) -> None:
    """bent = 1 - (score / cap)^2, the derivative of the softcap where it gave `score`; 0 for masked tokens."""
    one, inverse = splat(np.float32(1.0)), splat(np.float32(1.0 / cap))
    for head in range(count):
        for token in range(0, tokens, 16):
            offset = head * stride + 4 * token
            share = load_f32(scores + offset) * inverse
            share = choose_less(share, splat(np.float32(-1.0)), one, share)
            store(bent + offset, one - share * share)


@jit
def scale_weights(count: int, factors: int, weights: int, stride: int, tokens: int) -> None:
    """factors *= weights."""
    for head in range(count):
        for token in range(0, tokens, 16):
            offset = head * stride + 4 * token
            store(factors + offset, load_f32(factors + offset) * load_f32(weights + offset))


@jit
def shrink_sums(count: int, sums: int, dim: int, fades: int) -> None:
    """sums[head] *= fades[head], skipped where the factor is 1, as in most steps."""
    for head in range(count):
        fade = get(fades + 4 * head)
        if fade != np.float32(1.0):
            for d in range(0, dim, 16):
                address = sums + 4 * (head * dim + d)
                store(address, load_f32(address) * splat(fade))


@jit
def add_weighted(
    tag: Any,
    heads: Any,
    vectors: int,
    ahead: int,
    dim: int,
    block_size: int,
    weights: int,
    stride: int,
    sums: int,
    begin: int,
    end: int,
) -> None:
    """sums[head] += weights[head, token] * vectors[token] over tokens begin..end-1; prefetch as `score_block` does."""
    row = dim * tag.itemsize
    wide = dim - dim % 64
    half = block_size * row // 2
    for d in range(0, wide, 64):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 4)
        for token in range(begin, end):
            if ahead != 0:
                share = ahead + half + (d * block_size + 64 * token) * tag.itemsize // 2
                for line in range(0, 32 * tag.itemsize, LINE):
                    prefetch(share + line, 2)
                    prefetch(share + 2 * half + line, 2)
            columns = load_columns(tag, vectors + token * row + d * tag.itemsize, 4)
            tile = outer_fma(tile, columns, spread(weights + 4 * token, stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)
    for d in range(wide, dim, 16):
        tile = load_tile(sums + 4 * d, 4 * dim, heads, 1)
        for token in range(begin, end):
            if ahead != 0:
                share = ahead + half + (d * block_size + 16 * token) * tag.itemsize // 2
                prefetch(share, 2)
                prefetch(share + 2 * half, 2)
            columns = load_columns(tag, vectors + token * row + d * tag.itemsize, 1)
            tile = outer_fma(tile, columns, spread(weights + 4 * token, stride, heads))
        store_tile(sums + 4 * d, 4 * dim, heads, tile)


@borrowing
def add_block(
    tag: Any,
    heads: Any,
    vectors: int,
    ahead: int,
    dim: int,
    block_size: int,
    weights: int,
    stride: int,
    sums: int,
    valid: Array,
    first: int,
    filled: int,
    masked: bool,
) -> None:
    """`add_weighted` over a block, or over each run of its valid tokens if it is `masked`.

    Invalid tokens may hold NaN, which a weight of 0 would not remove.
    """
    token = 0
    while token < filled:
        end = token if masked else filled
        while end < filled and valid[first + end] != 0:
            end += 1
        add_weighted(tag, heads, vectors, ahead, dim, block_size, weights, stride, sums, token, end)
        token = end + 1
