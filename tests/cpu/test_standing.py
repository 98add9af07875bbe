"""`Standing`: a launch again and again, with other numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload.cpu.pool import write_tokens
from hf_offload.cpu.standing import ANYWHERE, Kept, Standing

SIZE = 8


def test_numbers_change_from_time_to_time_within_what_the_arrays_cover() -> None:
    pool = torch.zeros(2, 1, 2, SIZE, 16)
    block_ptr = pool.data_ptr() + np.arange(2, dtype=np.int64) * pool[0].nbytes
    table = np.array([[0, 1]], np.int32)
    tokens = torch.randn(3, 2, 1, 1, 1, 16)
    launch = write_tokens(*tokens[0], block_ptr, table, 0, SIZE)
    standing = Standing(launch, "an append", keys=ANYWHERE, values=ANYWHERE, start=2 * SIZE - 1)
    for (k, v), start in zip(tokens, (0, 7, 15), strict=True):
        standing.run(k.data_ptr(), v.data_ptr(), start)
        assert torch.equal(pool[start // SIZE, 0, :, start % SIZE], torch.stack([k, v]).view(2, 16))
    before = pool.clone()
    for wrong in (-1, 2 * SIZE):
        with pytest.raises(ValueError, match=rf"an append: start {wrong} is not within 0\.\.15"):
            standing.run(tokens[0, 0].data_ptr(), tokens[0, 1].data_ptr(), wrong)
        with pytest.raises(ValueError, match="an append: start"):
            standing.set("start", wrong)
    assert torch.equal(pool, before)
    standing.set("tasks", 0)
    standing.run(tokens[0, 0].data_ptr(), tokens[0, 1].data_ptr(), 3)
    assert torch.equal(pool, before)
    assert standing.tasks == 0


def test_a_kept_launch_is_found_by_the_very_same_arrays_and_equal_numbers() -> None:
    kept, arrays = Kept("an append"), (np.zeros((1, 2), np.int32), np.zeros(2, np.int64))
    assert kept.find(arrays, ()) is None
    k = torch.zeros(1, 1, 1, 16)
    launch = write_tokens(k, k, arrays[1], arrays[0], 0, SIZE)
    standing = kept.keep(launch, arrays, (1, "x"))
    assert kept.find(arrays, (1, "x")) is standing
    assert kept.find(arrays, (2, "x")) is None
    assert kept.find((arrays[0].copy(), arrays[1]), (1, "x")) is None
    kept.forget()
    assert kept.find(arrays, (1, "x")) is None
