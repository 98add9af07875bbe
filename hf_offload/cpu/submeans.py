"""Block scores from sub-means in int4: log of the sum over a block's sub-means of count * exp(score).

Shapes: a block has S sub-means a KV head; codes are packed as in `packing.py`. Lanes of a register
are the sub-means of one or more blocks, so that two registers hold 32 / S blocks: a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codes import add_code_dots, load_pieces, load_word_pair, store_counters, zero_counters
from .launch import F32, U8, Array, Launch, check_blocks, group_size, head_tiles, jit, new_ticket, require
from .memory import LINE, address_of, get, hold, prefetch, put, take
from .vector import MASKED, NOTHING, choose_less, exp, fma, load_f32, log, run_max, run_sum, splat, store, vmax

SUBMEANS = (2, 4, 8, 16, 32)
_LOWEST = np.float32(-3.4e38)  # only -inf is smaller
_CHUNK_BLOCKS = 1024  # blocks of a task
_AHEAD = 3  # steps from a prefetch to its use


@jit
def _prepare_query(query: Array, center: Array, sigma: Array, scale: float, pairs: Array, facts: Array) -> None:
    """Round sigma * query of one head to int16, in the order of `add_code_dots`.

    facts: [0] what a unit of the integers is worth in scores, [1] the score of `center`. 16 bits keep scores within
    about 1e-4; the codes, in 4 bits, are far coarser.
    """
    dim = query.shape[0]
    top, middle = np.float32(0.0), np.float32(0.0)
    for d in range(dim):
        top = max(top, abs(query[d] * sigma[d]))
        middle += query[d] * center[d]
    inverse = np.float32(32767.0) / top if top > np.float32(0.0) else np.float32(0.0)
    for d in range(0, dim, 8):
        for i in range(4):
            low = np.int32(np.rint(query[d + i] * sigma[d + i] * inverse))
            high = np.int32(np.rint(query[d + i + 4] * sigma[d + i + 4] * inverse))
            pairs[d // 2 + i] = (low & np.int32(0xFFFF)) | (high << np.int32(16))
    facts[0] = np.float32(scale) * top / np.float32(32767.0)
    facts[1] = np.float32(scale) * middle


@jit
def _score_step(
    heads: Any,
    pieces: Any,
    dim: int,
    submeans: int,
    places: int,
    pairs: int,
    facts: int,
    spare: int,
    peaks: int,
    masses: int,
    stride: int,
) -> None:
    """Peak and mass of the log-sum-exp of one step's blocks, for one register tile of heads.

    places: addresses of the step's codes, scales and biases, 2 * pieces each. spare: room for 2 * heads + 4 registers.
    """
    right, width = 8 * len(pieces), 64 // len(pieces)
    sums = zero_counters(heads)
    for d in range(0, dim // 2, 4):
        words = load_word_pair(places, places + right, d * submeans, pieces)
        sums = add_code_dots(sums, words, pairs + 64 * d, 32 * dim, heads)
    found = spare + 128 * len(heads)
    store_counters(spare, sums)
    low, mask = splat(_LOWEST), splat(MASKED)
    x_scale, y_scale = load_pieces(places + 2 * right, 0, pieces), load_pieces(places + 3 * right, 0, pieces)
    x_bias, y_bias = load_pieces(places + 4 * right, 0, pieces), load_pieces(places + 5 * right, 0, pieces)
    if submeans > 16:  # the second register holds the other half of the same block
        y_scale, y_bias = load_pieces(places + 2 * right, 64, pieces), load_pieces(places + 4 * right, 64, pieces)
    for head in range(len(heads)):
        unit, middle = splat(get(facts + 8 * head)), splat(get(facts + 8 * head + 4))
        x = fma(load_f32(spare + 128 * head) * x_scale, unit, middle) + x_bias
        y = fma(load_f32(spare + 128 * head + 64) * y_scale, unit, middle) + y_bias
        x, y = choose_less(x_bias, low, mask, x), choose_less(y_bias, low, mask, y)
        x_peak, y_peak = run_max(x, pieces), run_max(y, pieces)
        if submeans > 16:
            x_peak = vmax(x_peak, y_peak)
            y_peak = x_peak
        x_mass, y_mass = run_sum(exp(x - x_peak), pieces), run_sum(exp(y - y_peak), pieces)
        store(found, x_peak)
        store(found + 64, y_peak)
        store(found + 128, x_mass + y_mass if submeans > 16 else x_mass)
        store(found + 192, y_mass)
        for i in range(2 * len(pieces)):
            put(peaks + head * stride + 4 * i, get(found + i * width))
            put(masses + head * stride + 4 * i, get(found + 128 + i * width))


@jit
def submeans_kernel(
    ticket: Array,
    tasks: int,
    full: Any,
    rest: Any,
    pieces: Any,
    query: Array,
    codes: Array,
    scales: Array,
    bias: Array,
    center: Array,
    sigma: Array,
    table: Array,
    n_blocks: int,
    logmass: Array,
    scale: float,
) -> None:
    """One task = one (row, KV head, up to 1024 blocks)."""
    _, kv_heads, submeans = scales.shape
    dim = query.shape[2]
    group = query.shape[1] // kv_heads
    size = submeans * dim // 2
    step = 2 * len(pieces) if submeans <= 16 else 1
    chunks = (n_blocks + _CHUNK_BLOCKS - 1) // _CHUNK_BLOCKS
    row = _CHUNK_BLOCKS + 2 * len(pieces)  # a step may write beyond the chunk
    pairs = np.empty((group, dim // 2, 16), np.int32)
    facts, scratch = np.empty((group, 2), np.float32), np.empty(2 * group * row + 192, np.float32)
    places = np.empty(6 * len(pieces), np.int64)
    peaks = address_of(scratch)
    masses = peaks + 4 * group * row
    spare = masses + 4 * group * row
    while True:
        task = take(ticket)
        if task >= tasks:
            break
        b, h, chunk = task // (chunks * kv_heads), task // chunks % kv_heads, task % chunks
        begin = chunk * _CHUNK_BLOCKS
        end = min(begin + _CHUNK_BLOCKS, n_blocks)
        for g in range(group):
            _prepare_query(query[b, h * group + g], center[h], sigma[h], scale, pairs[g], facts[g])
        code_base, scale_base = address_of(codes) + h * size, address_of(scales) + 4 * h * submeans
        for n in range(begin, end, step):
            for later in range(n + _AHEAD * step, min(n + (_AHEAD + 1) * step, end)):
                p = np.int64(table[b, later])
                prefetch(scale_base + 4 * p * kv_heads * submeans, 1)
                for line in range(0, size, LINE):
                    prefetch(code_base + p * kv_heads * size + line, 1)
            for i in range(2 * len(pieces)):
                p = np.int64(table[b, min(n + i, end - 1)])
                places[i] = code_base + p * kv_heads * size
                places[2 * len(pieces) + i] = scale_base + 4 * p * kv_heads * submeans
                places[4 * len(pieces) + i] = address_of(bias) + 4 * p * submeans
            if submeans > 16:
                places[1] = places[0] + 64
            done, at = 0, 4 * (n - begin)
            while done + len(full) <= group:
                offset = 4 * done * row + at
                _score_step(
                    full, pieces, dim, submeans, address_of(places), address_of(pairs) + 32 * done * dim,
                    address_of(facts) + 8 * done, spare,
                    peaks + offset, masses + offset, 4 * row,
                )  # fmt: skip
                done += len(full)
            if done < group:
                offset = 4 * done * row + at
                _score_step(
                    rest, pieces, dim, submeans, address_of(places), address_of(pairs) + 32 * done * dim,
                    address_of(facts) + 8 * done, spare,
                    peaks + offset, masses + offset, 4 * row,
                )  # fmt: skip
        nothing, low = splat(NOTHING), splat(np.float32(-np.inf))
        for g in range(group):
            for n in range(0, (end - begin) & ~15, 16):
                peak = load_f32(peaks + 4 * (g * row + n))
                total = peak + log(load_f32(masses + 4 * (g * row + n)))
                target = address_of(logmass) + 4 * ((b * kv_heads + h) * group + g) * logmass.shape[2]
                store(target + 4 * (begin + n), choose_less(peak, nothing, low, total))
            for n in range((end - begin) & ~15, end - begin):
                peak, mass = get(peaks + 4 * (g * row + n)), get(masses + 4 * (g * row + n))
                logmass[b, h * group + g, begin + n] = -np.inf if peak < NOTHING else peak + np.log(mass)
    hold(scratch)
    hold(places)
    hold(pairs)
    hold(facts)


def score_submeans(
    query: Array,
    codes: Array,
    scales: Array,
    bias: Array,
    center: Array,
    sigma: Array,
    table: Array,
    n_blocks: int,
    logmass: Array,
    *,
    scale: float,
) -> Launch:
    """Prepare the log mass of each block from its sub-means.

    With p = table[b, n] and sub-mean m_j = center[h] + sigma[h] * scales[p, h, j] * code[p, h, j]:
    logmass[b, hq, n] = log sum_j exp(bias[p, j] + scale * query[b, hq] . m_j). The query is rounded to 16 bits.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        codes: uint8 [P, Hkv, S * D / 2], from `packing.pack_codes`; S is 2, 4, 8, 16 or 32.
        scales: float32 [P, Hkv, S].
        bias: float32 [P, S], log of the valid tokens of the sub-mean; -inf if none, whatever codes and scales hold.
        center: float32 [Hkv, D].
        sigma: float32 [Hkv, D].
        table: int32 [B, N], physical block of each logical one.
        n_blocks: blocks 0..n_blocks-1 are scored.
        logmass: float32 [B, Hq, N], written up to n_blocks; -inf where all biases are.
        scale: factor of the scores, usually D ** -0.5.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    physical, kv_heads, submeans = scales.shape
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    if dim % 16 or not 16 <= dim <= 256 or submeans not in SUBMEANS:
        raise ValueError(f"D {dim} must be a multiple of 16 in 16..256, and S {submeans} one of {SUBMEANS}")
    require("query", query, F32, (batch, query_heads, dim))
    require("codes", codes, U8, (physical, kv_heads, submeans * dim // 2))
    require("scales", scales, F32, (physical, kv_heads, submeans))
    require("bias", bias, F32, (physical, submeans))
    require("center", center, F32, (kv_heads, dim))
    require("sigma", sigma, F32, (kv_heads, dim))
    check_blocks(table, logmass, batch, query_heads, n_blocks)
    pieces = (0,) * max(1, 16 // submeans)
    args = (full, rest, pieces, query, codes, scales, bias, center, sigma, table, int(n_blocks), logmass, float(scale))
    tasks = batch * kv_heads * -(-n_blocks // _CHUNK_BLOCKS)
    return Launch(submeans_kernel, tasks, args, new_ticket(), batch * n_blocks * kv_heads * submeans * (dim // 2 + 8))
