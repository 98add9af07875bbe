"""The prefetch of the next chunk's digests in `submean_scores`: the shares of all heads cover every cache line."""

from __future__ import annotations

import numpy as np
import pytest
from pools import for_python

from hf_offload.cpu.kernels import submean_scores

sweep_from, sweep_on = for_python(submean_scores.sweep_from, submean_scores.sweep_on)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("row", [64, 96, 1536])
@pytest.mark.parametrize(("begin", "end", "steps"), [(128, 256, 64), (128, 133, 64), (7, 8, 1), (130, 229, 3)])
def test_the_shares_of_all_heads_cover_every_line(kv_heads: int, row: int, begin: int, end: int, steps: int) -> None:
    memory, table = np.zeros(300 * row, np.uint8), np.arange(300, dtype=np.int32)[::-1].copy()
    lines = -(-row // 64)
    reached = begin * lines
    for h in range(kv_heads):
        sweep = sweep_from(memory.ctypes.data, row, begin, end, h, kv_heads, steps)
        assert sweep.position * lines + sweep.line <= reached, "a gap behind the head before"
        for _ in range(steps):
            sweep = sweep_on(sweep, table, end)
        reached = sweep.position * lines + sweep.line
    assert reached == end * lines


def test_nothing_lies_behind_the_last_chunk() -> None:
    sweep = sweep_from(0, 64, 256, 256, 0, 1, 5)
    assert sweep_on(sweep, np.zeros(0, np.int32), 256)[3:5] == (256, 0), "no block was looked up, no address touched"
