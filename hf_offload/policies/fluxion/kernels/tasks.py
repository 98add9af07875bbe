"""Choice and attention of whole (row, KV head) pairs, each by the thread that takes it, while a device takes others.

Method: Fluxion, section 6.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_offload.cpu.kernels.block import STEP_TOKENS
from hf_offload.cpu.kernels.block_topk import SPARE
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS, SPARE_BLOCKS
from hf_offload.cpu.kernels.int8_blocks import spare_bytes
from hf_offload.cpu.kernels.parts import clear_part, merge_parts, part_blocks, partial_state
from hf_offload.cpu.kernels.record import record_of
from hf_offload.cpu.kernels.sparse_decode import attend_step
from hf_offload.cpu.launch import I32, Array, Launch, jit, kernel, require
from hf_offload.cpu.memory import address_of, count_up, hold
from hf_offload.cpu.simd.vectors import load_f32, splat, store

from .dealing import Hands, take
from .retrieve import score_run, take_blocks


@jit
def _choose(choice: Any, b: int, h: int) -> None:
    (
        digest, full, rest, query, table, scale, cap, first, end, sums, budget0, slope, streaming, _1, block_size, _2,
        _3, masses, _4, spans, runs, blocks, counts,
    ) = choice  # fmt: skip
    group, low = query.shape[1] // counts.shape[1], min(max(first[b], 0), end)
    row = (min(CHUNK_BLOCKS, end) + SPARE_BLOCKS) * len(digest.runs)
    scores, word = np.empty(group * row, np.float32), np.empty(1, np.int32)
    scratch = np.empty((4, end + SPARE), np.float32)
    for begin in range(low // CHUNK_BLOCKS * CHUNK_BLOCKS, end, CHUNK_BLOCKS):
        stop = min(begin + CHUNK_BLOCKS, end)
        score_run(digest, full, rest, query, group, table, b, h, scale, cap, begin, stop, stop, scores, masses)
    take_blocks(
        b, h, group, spans[b, h], low, end, masses, sums, budget0, slope, streaming, block_size, scratch, word, runs,
        blocks, counts,
    )  # fmt: skip


@jit
def _attend(attention: Any, b: int, h: int) -> None:
    """Attend what was chosen, in the parts of `decode_kernel`: the result is the same in every bit."""
    (
        tag, full, rest, query, block_ptr, table, blocks, counts, holes, valid, length, out, lse, _1, _2, block_size,
        scale, cap, parts, partial, _3, packed, packed_record, prefetches,
    ) = attention  # fmt: skip
    kv_heads, dim = counts.shape[1], query.shape[2]
    group, head = query.shape[1] // kv_heads, b * kv_heads + h
    record = 2 * block_size * dim * tag.itemsize
    step, stride = max(1, STEP_TOKENS // block_size), 4 * max(STEP_TOKENS, block_size)
    share = part_blocks(counts[b, h], parts, block_size, step)
    part, partial_step = 4 * group * dim, 4 * partial.shape[1]
    state_offset = partial_state(group, dim, False)
    scratch = np.empty(16 + (part + 2 * group * stride + spare_bytes(dim, block_size)) // 4, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    scores = queries + part
    spare = scores + 2 * group * stride
    addresses = np.empty(share + step, np.int64)
    source = address_of(query) + head * part
    for place in range(0, part, 64):
        store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
    origin = address_of(partial) + head * parts * partial_step
    for number in range(parts):
        begin = min(number * share, counts[b, h])
        mine = min(counts[b, h] - begin, share)
        chosen = blocks[b, h, begin : begin + mine]
        sums = origin + number * partial_step
        clear_part(sums, dim, group, False)
        for i in range(mine):
            addresses[i] = record_of(block_ptr[table[b, chosen[i]]], h, record, packed, packed_record)
        for i in range(mine, mine + step):
            addresses[i] = addresses[max(i - 1, 0)]
        for first in range(0, mine, step):
            last = min(first + step, mine)
            attend_step(
                tag, full, rest, group, addresses, chosen, first, last, valid[b], holes[b], length, queries, dim,
                block_size, cap, scores, stride, sums + state_offset, sums, 0, 0, 0, prefetches, packed, spare,
            )  # fmt: skip
    merge_parts(
        origin, parts, partial_step, dim, group, False, lse[b, h * group : (h + 1) * group],
        address_of(out) + head * part, 0,
    )  # fmt: skip
    hold(scratch)


@kernel
def task_kernel(ticket: Array, tasks: int, hands: Any, choice: Any, attention: Any) -> None:
    """One task = choice and attention of one (row, KV head); what is left for a thread, it knows of the hands."""
    kv_heads = choice[-1].shape[1]
    while True:
        task = take(hands, 0)
        if task < 0:
            break
        count_up(ticket, 0)
        b, h = task // kv_heads, task % kv_heads
        _choose(choice, b, h)
        _attend(attention, b, h)
        count_up(ticket, 1)


def whole_tasks(choice: Launch, attention: Launch, hands: Hands) -> Launch:
    """Prepare choice and attention of (row, KV head) pairs, each in one task.

    The runs that are read (`spans`) and what pairs that are in no list get are for the caller to write before.

    Args:
        choice: from `retrieve.retrieve_blocks`, not run.
        attention: from `sparse_decode`, not run, without `kbar` and `scores`, over what `choice` chooses.
        hands: for B * Hkv tasks; a task is row * Hkv + KV head. Read when the launch runs: whoever calls it takes part
            until nothing is left that a thread of the CPU should do.

    Raises:
        ValueError: launches that do not fit together.
        TypeError: an array of another dtype.
    """
    counts, chosen = choice.args[-1], choice.args[-2]
    if attention.args[6] is not chosen or attention.args[7] is not counts:
        raise ValueError("the attention is to other blocks than those that are chosen; prepare both on the same arrays")
    if len(attention.args[13]) or len(attention.args[14]):
        raise ValueError("tasks return neither kbar nor scores; prepare the attention without them")
    require("order", hands.order, I32, (2, counts.size))
    args = (hands, choice.args, attention.args)
    return Launch(task_kernel, counts.size, args, choice.cost + attention.cost, dealt=True)
