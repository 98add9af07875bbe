"""Moving average of attention weights (MAW), or their decaying maximum, of each token and query head.

Source: HGCA, algorithm 1, line 8: A = (1 - alpha) A + alpha (the weights of this step). A token that is n steps old
takes in 1/n of a step where that is more than alpha: until then the average is the mean. A decaying maximum keeps a
weight that one query gave, which a mean over many queries loses.
"""

from __future__ import annotations

import numpy as np

from hf_offload.cpu.launch import F32, Array, Launch, kernel, require
from hf_offload.cpu.memory import address_of, count_up, next_task
from hf_offload.cpu.simd.convert import load_first, store_first
from hf_offload.cpu.simd.vectors import exp, fma, splat, vmax

_TASK_TOKENS = 8192  # averages of a task, at most, unless a head has more


@kernel
def average_kernel(
    ticket: Array,
    tasks: int,
    average: Array,
    scores: Array,
    lse: Array,
    first: int,
    length: int,
    rates: Array,
    fade: float,
    largest: bool,
    chunk: int,
) -> None:
    """One task = `chunk` pairs of a row and a query head."""
    query_heads = lse.shape[1]
    pairs = lse.shape[0] * query_heads
    left = splat(np.float32(fade))
    ages = address_of(rates) + 4 * (rates.shape[0] - length + first)
    task = count_up(ticket, 0)
    while task < tasks:
        for pair in range(task * chunk, min((task + 1) * chunk, pairs)):
            b, h = pair // query_heads, pair % query_heads
            total = lse[b, h]
            # Nothing attended: every weight is exp(-inf).
            shift = splat(np.float32(np.inf) if total == -np.inf else total)
            address = address_of(average) + 4 * (pair * average.shape[2] + first)
            source = address_of(scores) + 4 * pair * scores.shape[2]
            for token in range(0, length - first, 16):
                count = length - first - token
                weight = exp(load_first(source + 4 * token, count) - shift)
                mean = load_first(address + 4 * token, count)
                rate = load_first(ages + 4 * token, count)
                mean = vmax(left * mean, rate * weight) if largest else fma(weight - mean, rate, mean)
                store_first(address + 4 * token, count, mean)
        task = next_task(ticket)


def move_averages(
    average: Array,
    scores: Array,
    lse: Array,
    first: int,
    length: int,
    *,
    alpha: float,
    share: float | None = None,
    after: int = 0,
) -> Launch:
    """Prepare taking one step's attention weights into the averages of tokens first..length-1 of every row.

    A weight is exp(score - lse). Without `share` an average moves towards it; with it, it becomes the larger of
    (1 - alpha) * average and share * weight. The newest token is one step old. Between two runs
    `first` and `length` may be set, within what the arrays cover: length - first at most W, length at most T.

    Args:
        average: float32 [B, Hq, T], finite at these tokens, written.
        scores: float32 [B, Hq, W], of tokens from `first` on, as they entered the softmax; -inf where not attended.
        lse: float32 [B, Hq], natural log of the sum of exp(score); -inf where nothing was attended: weights are 0.
        first: the first token.
        length: the token after the last.
        alpha: what the weights count in the average, 0 to 1; in that of a token n steps old at least 1/n. With `share`:
            what the average loses in a step.
        share: what a weight counts beside the largest before it, or None.
        after: with `share`, number of a token's first steps whose weights do not count.

    Raises:
        ValueError: shapes that contradict each other, or a memory layout that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    batch, query_heads, capacity = average.shape
    width = scores.shape[-1]
    require("average", average, F32, average.shape)
    require("scores", scores, F32, (batch, query_heads, width))
    require("lse", lse, F32, (batch, query_heads))
    if not 0 <= first <= length <= capacity or length - first > width:
        raise ValueError(f"tokens {first}..{length}: the averages hold {capacity} tokens, the scores {width}")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be within 0..1, got {alpha}")
    pairs = batch * query_heads
    chunk = max(1, min(_TASK_TOKENS // max(width, 1), pairs))
    age = np.arange(width, 0, -1, dtype=np.float32)
    if share is None:
        rates = np.maximum(np.float32(alpha), 1 / age)
    else:
        rates = np.where(age > after, np.float32(share), np.float32(0.0))
    args = (average, scores, lse, int(first), int(length), rates, 1.0 - float(alpha), share is not None, chunk)
    return Launch(average_kernel, -(-pairs // chunk), args, 8 * pairs * width)
