"""Block scores from digests: a softmax over blocks for each query head, joined into one score for the group.

A digest gives every block S scores for each query head; the block's mass is the sum of their exponentials. Blocks are
scored in chunks of 128, each with its own peak, and `join_chunks` joins the chunks of a KV head. The newest tokens, in
blocks without a digest, contribute their exact log mass (`tail_of_head`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload.cpu.kernels.block import clear_scores, mask_scores, score_block, soften_scores, softmax_step
from hf_offload.cpu.kernels.submean_scores import SubMeans, score_submeans, sweep_from, sweep_on
from hf_offload.cpu.launch import F32, Array, by_class, by_tiles, jit, require, tag_of
from hf_offload.cpu.memory import LINE, address_of, get, hold, prefetch, put
from hf_offload.cpu.simd.register_tiles import dot_quad, repeat_quad, store_quads
from hf_offload.cpu.simd.vectors import (
    MASKED,
    NOTHING,
    bend,
    choose_less,
    exp,
    lane_max,
    lane_sum,
    load_f32,
    log,
    run_totals,
    splat,
    store,
    vmax,
)


@by_tiles
@jit
def _absorb(
    heads: Any, done: int, tag: Any, keys: int, query: int, dim: int, block_size: int, valid: Array, begin: int,
    masked: bool, length: int, cap: Any, scores: int, state: int, state_step: int,
) -> None:  # fmt: skip
    """Add one block's tokens to the log-sum-exp of a register tile of heads, from head `done` of the group on."""
    count, stride = len(heads), 4 * max(block_size, 16)
    score_block(tag, heads, keys, 0, query + 4 * done * dim, dim, block_size, scores, stride)
    if cap is not None:
        soften_scores(count, scores, stride, block_size, cap)
    clear_scores(count, scores, stride, block_size, stride // 4)
    if masked:
        mask_scores(count, scores, stride, valid, begin, length - begin, block_size)
    peaks = state + 4 * done
    softmax_step(count, scores, stride, stride // 4, peaks, peaks + state_step, peaks + 2 * state_step)


@jit
def tail_of_head(
    blocks: Any, full: Any, rest: Any, query: Array, b: int, h: int, kv_heads: int, first_block: int, length: int,
    scale: float, cap: Any, lse: Array,
) -> None:  # fmt: skip
    """Write the log-sum-exp of the scores of all tokens from `first_block` on, for KV head h's query heads in row b.

    Args:
        blocks: a `HostBlocks`, of which none from `first_block` on is packed.
        query: float32 [G, D].
        lse: float32 [G], written: natural log; -inf where there is no token.
    """
    (group, dim), size, holes, valid = query.shape, blocks.block_size, blocks.holes[b], blocks.valid[b]
    part, state_step = 4 * group * dim, 4 * group
    record, block_ptr, table = 2 * size * dim * blocks.tag.itemsize, blocks.block_ptr, blocks.table[b]
    scratch = np.empty((part + 3 * state_step) // 4 + 4 * max(size, 16), np.float32)
    queries = address_of(scratch)
    state = queries + part
    for offset in range(0, part, 64):
        store(queries + offset, load_f32(address_of(query) + offset) * splat(np.float32(scale)))
    for head in range(group):
        put(state + 4 * head, NOTHING)
        put(state + state_step + 4 * head, np.float32(0.0))
    for n in range(first_block, (length + size - 1) // size):
        masked = holes[n] != 0 or (n + 1) * size > length
        _absorb(
            full, rest, group, blocks.tag, block_ptr[table[n]] + h * record, queries, dim, size, valid, n * size,
            masked, length, cap, state + 3 * state_step, state, state_step,
        )  # fmt: skip
    for head in range(group):
        mass = get(state + state_step + 4 * head)
        peak = get(state + 4 * head)
        lse[head] = -np.inf if mass == np.float32(0.0) else peak + np.log(mass)
    hold((scratch, query))


JOINS = {"max": 0, "mean": 1, "raw": 2}
CHUNK_BLOCKS = 128
SPARE_BLOCKS = 32  # a digest may write this many blocks beyond its chunk
_LOWEST = np.float32(-3.4e38)  # only -inf is smaller
# Negligible scores and masses are raised to a floor, so that no product is denormal, which would cost a hundred cycles.
_FLOOR, _LEAST = np.float32(-40.0), np.float32(1e-18)
_OCTAVE = np.float32(math.log(2))


class Vectors(NamedTuple):
    """Digests of one vector for each block: mean key (W = D), or Quest's maximum and minimum (W = 2 D; section 3.3).

    Args:
        query: float32 [B, Hq, W], scaled; for Quest its positive part, then its negative part.
        vectors: [P, Hkv, W] by physical block; 16-bit floats as bits.
        bias: float32 [P]; -inf marks a block without valid tokens, whatever its vectors hold.
        runs: one entry: a block has one score.
    """

    query: Array
    vectors: Array
    bias: Array
    runs: tuple[int] = (0,)


Digest = SubMeans | Vectors


def vectors(query: Array, digests: Array, bias: Array, *, dtype: torch.dtype) -> Vectors:
    """Check and bundle the arrays of a `Vectors`.

    Raises:
        ValueError: shapes that contradict each other or a memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    physical, kv_heads, width = digests.shape
    if width % 16 or not width:
        raise ValueError(f"vectors of width {width} are not a multiple of 16; pad them with zeros")
    require("query", query, F32, (*query.shape[:2], width))
    require("vectors", digests, tag_of(dtype).dtype, (physical, kv_heads, width))
    require("bias", bias, F32, (physical,))
    return Vectors(query, digests, bias)


def check_digest(digest: Digest, query_shape: tuple[int, ...], kv_heads: int, n_blocks: int) -> int:
    """Raise ValueError unless a digest serves queries of this shape; return the bytes that scoring `n_blocks` reads."""
    batch, query_heads, dim = query_shape
    if isinstance(digest, Vectors):
        fits = digest.query.shape[:2] == (batch, query_heads) and digest.vectors.shape[1] == kv_heads
        record = kv_heads * digest.vectors.shape[2] * digest.vectors.itemsize
    else:
        fits = digest.center.shape == (batch, kv_heads, dim)
        record = kv_heads * (digest.codes.shape[2] + 4 * digest.sizes.shape[2] * (digest.levels.shape[2] + 1))
    if not fits:
        shapes = [x.shape for x in digest if isinstance(x, np.ndarray)]
        raise ValueError(
            f"a digest of shapes {shapes} does not serve {batch} rows, {query_heads} query heads of {dim} and "
            f"{kv_heads} KV heads"
        )
    return int(batch * n_blocks * record)


@by_tiles
@jit
def _score_quad(
    heads: Any, done: int, tag: Any, rows: Any, biases: Any, query: int, width: int, cap: Any, target: int, stride: int
) -> None:
    """Scores of 4 blocks for a register tile of heads, from head `done` of the group on."""
    dots = bend(dot_quad(tag, heads, rows, query + 4 * done * width, width), cap)
    store_quads(
        target + done * stride, stride, heads, choose_less(biases, splat(_LOWEST), splat(MASKED), dots + biases)
    )


def _score_vectors(
    digest: Any, full: Any, rest: Any, query: Array, group: int, table: Array, b: int, h: int, scale: float, cap: Any,
    begin: int, end: int, reach: int, out: int, stride: int,
) -> None:  # fmt: skip
    kv_heads, width = digest.vectors.shape[1:]
    row = width * digest.vectors.itemsize
    base = address_of(digest.vectors) + h * row
    queries = address_of(digest.query) + 4 * (b * kv_heads + h) * group * width
    step, bias = kv_heads * row, digest.bias
    sweep = sweep_from(address_of(digest.vectors), step, end, reach, h, kv_heads, (end - begin + 3) // 4)
    for n in range(begin, end, 4):
        sweep = sweep_on(sweep, table[b], reach)
        p0, p1 = table[b, n], table[b, min(n + 1, end - 1)]
        p2, p3 = table[b, min(n + 2, end - 1)], table[b, min(n + 3, end - 1)]
        for later in range(n + 8, min(n + 12, end)):
            ahead = base + np.int64(table[b, later]) * step
            for line in range(0, row, LINE):
                prefetch(ahead + line, 2)
        rows = (base + p0 * step, base + p1 * step, base + p2 * step, base + p3 * step)
        biases = repeat_quad(bias[p0], bias[p1], bias[p2], bias[p3])
        target = out + 4 * (n - begin)
        _score_quad(full, rest, group, digest.vectors, rows, biases, queries, width, cap, target, stride)


write_scores = by_class({SubMeans: score_submeans, Vectors: _score_vectors}, allocating=True)
"""(digest, full, rest, query, group, table, b, h, scale, cap, begin, end, reach, out, stride): write the S scores of
blocks begin..end-1 of row b for the query heads of KV head h, MASKED where none is valid.

Args:
    digest: a `Digest`.
    full, rest: tags of `launch.head_tiles`.
    query: float32 [B, Hq, D]; table: int32 [B, N].
    scale, cap: factor and softcap (or None) of the scores.
    reach: prefetch this head's share of the digests of blocks end..reach-1, all KV heads (see `sweep_on`).
    out: address of float32 [group, (end - begin + SPARE_BLOCKS) * S], rows `stride` bytes apart.
"""


@jit
def soften_chunk(runs: Any, scores: int, blocks: int, raw: bool, masses: int) -> Any:
    """Turn the scores of a chunk's blocks into masses relative to exp(peak); return the peak, MASKED if none is valid.

    The peak is the largest score, rounded up to a multiple of log 2: how a mass is rounded to 16 bits does not depend
    on the chunk that its block lies in. Blocks without valid tokens get mass 0, all others a positive mass. With `raw`
    the masses are absolute logarithms, -inf for blocks without valid tokens, and the peak has no meaning.

    Args:
        runs: a tuple as long as a block has scores (S).
        scores: address of float32 [blocks rounded up to a multiple of 16, S], overwritten.
        masses: address of float32, written up to a multiple of 16 blocks.
    """
    end = (4 * blocks * len(runs) + 63) & ~63
    padded = (blocks + 15) & ~15
    nothing, masked = splat(NOTHING), splat(MASKED)
    for i in range(4 * blocks * len(runs), end, 4):
        put(scores + i, MASKED)
    for i in range(end, 4 * padded * len(runs), 64):
        store(scores + i, masked)
    if raw and len(runs) == 1:
        for i in range(0, end, 64):
            x = load_f32(scores + i)
            store(masses + i, choose_less(x, nothing, splat(np.float32(-np.inf)), x))
        return MASKED
    peak = masked
    for i in range(0, end, 64):
        peak = vmax(peak, load_f32(scores + i))
    top = lane_max(peak)
    if top > NOTHING:
        top = np.ceil(top / _OCTAVE) * _OCTAVE
    for i in range(0, 4 * padded * len(runs), 64):
        x = load_f32(scores + i)
        weight = exp(vmax(x - splat(top), splat(_FLOOR)))
        store(scores + i, choose_less(x, nothing, splat(np.float32(0.0)), weight))
    for n in range(0, 4 * padded, 64):
        total = run_totals(scores + n * len(runs), runs)
        if raw:
            zero, none = splat(np.float32(0.0)), splat(np.float32(-np.inf))
            total = choose_less(zero, total, log(total) + splat(top), none)
        store(masses + n, total)
    return top


@jit
def chunk_shares(
    masses: Array, peaks: Array, chunks: int, tail: float, n_blocks: int, parts: int, factors: Array
) -> bool:
    """Write what turns each chunk's masses of one query head into shares of its attention, over `parts`.

    Args:
        masses: float32 [N] from `soften_chunk`; peaks: float32 [chunks] of them.
        tail: log of the mass of tokens that have no digest.
        factors: float32 [chunks], written.

    Returns:
        Whether there is any mass; otherwise all factors are 0.
    """
    padded = 4 * ((n_blocks + 15) & ~15)
    top = tail
    for chunk in range(chunks):
        top = max(top, peaks[chunk])
        factors[chunk] = np.float32(0.0)
    if top < NOTHING:
        return False
    total = np.float32(math.exp(tail - top))
    for chunk in range(chunks):
        part = splat(np.float32(0.0))
        for n in range(4 * chunk * CHUNK_BLOCKS, min(4 * (chunk + 1) * CHUNK_BLOCKS, padded), 64):
            part = part + load_f32(address_of(masses) + n)
        total += lane_sum(part) * np.float32(math.exp(peaks[chunk] - top))
    for chunk in range(chunks):
        factors[chunk] = np.float32(math.exp(peaks[chunk] - top)) / (total * np.float32(parts))
    return True


@jit
def join_chunks(masses: Array, peaks: Array, tail: Array, n_blocks: int, mode: int, score: Array) -> None:
    """Join the masses of a KV head's query heads into one score for each block.

    Args:
        masses: float32 [G, N] from `soften_chunk`, N at least n_blocks rounded up to a multiple of 16.
        peaks: float32 [G, chunks].
        tail: float32 [G], log of the mass of tokens that have no digest.
        mode: a value of `JOINS`.
        score: float32 [N], written up to a multiple of 16 blocks.
    """
    group, chunks = peaks.shape
    padded = 4 * ((n_blocks + 15) & ~15)
    low, zero = splat(np.float32(-np.inf)), splat(np.float32(0.0))
    joined = address_of(score)
    for n in range(0, padded, 64):
        store(joined + n, zero)
    best, factors = np.zeros(padded // 4 + 16, np.float32), np.empty(chunks, np.float32)
    for g in range(group):
        log_masses = address_of(masses[g])
        if mode == 2:
            for n in range(0, padded, 64):
                share = load_f32(log_masses + n) * splat(np.float32(1.0) / np.float32(group))
                store(joined + n, load_f32(joined + n) + share)
            continue
        if not chunk_shares(masses[g], peaks[g], chunks, tail[g], n_blocks, 1 if mode == 0 else group, factors):
            continue
        for chunk in range(chunks):
            share = max(factors[chunk], _LEAST)
            for n in range(4 * chunk * CHUNK_BLOCKS, min(4 * (chunk + 1) * CHUNK_BLOCKS, padded), 64):
                mass = load_f32(log_masses + n)
                store(address_of(best) + n, vmax(load_f32(address_of(best) + n), mass))
                x, old = mass * splat(share), load_f32(joined + n)
                store(joined + n, vmax(old, x) if mode == 0 else old + x)
    if mode != 2:
        for n in range(0, padded, 64):
            store(joined + n, choose_less(zero, load_f32(address_of(best) + n), load_f32(joined + n), low))
    hold(best)
