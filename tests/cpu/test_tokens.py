"""`tokens.sparse_decode_tokens` against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_offload.cpu import reference
from hf_offload.cpu.tokens import sparse_decode_tokens

from ._pools import make_case, run


@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype", "softcap"),
    [
        (3, 64, 32, torch.bfloat16, None),
        (3, 80, 16, torch.bfloat16, 30.0),
        pytest.param(1, 16, 8, torch.float32, None, marks=pytest.mark.slow),
        pytest.param(5, 80, 16, torch.float16, 30.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kbar", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_lists_of_every_length(
    group: int, dim: int, block_size: int, dtype: torch.dtype, softcap: float | None, kbar: bool, threads: int
) -> None:
    torch.manual_seed(dim)
    batch, kv_heads, length = 2, 4, 2000
    case = make_case(batch, kv_heads, dim, block_size, length, dtype, padding=(0, 77), scattered=0.1)
    query = torch.randn(batch, kv_heads * group, dim) * 2
    lists = []
    for i, count in enumerate((1900, 0, 1, 65, 3, 600, 64, 513)):  # beyond a part, empty, odd
        usable = case.valid[i // kv_heads, :length].nonzero()[:, 0]
        lists.append(usable[torch.randperm(len(usable))[:count]].sort()[0].int())
    offsets = np.array([0, *np.cumsum([len(x) for x in lists])], np.int64)
    out, lse, means = torch.full_like(query, 7), torch.full(query.shape[:2], 7.0), torch.full_like(query, 7)
    launch = sparse_decode_tokens(
        query.numpy(), case.block_ptr, case.table.numpy(), torch.cat(lists).numpy(), offsets, out.numpy(), lse.numpy(),
        means.numpy() if kbar else None, kv_dtype=dtype, block_size=block_size, scale=dim**-0.5, softcap=softcap,
    )  # fmt: skip
    assert launch.tasks > len(lists)
    run(launch, threads)
    for i, listed in enumerate(lists):
        b, h = divmod(i, kv_heads)
        physical = case.table[b, listed.long() // block_size].long()
        keys, values = case.clean[physical, h, :, listed.long() % block_size].double().unbind(1)
        for g in range(group):
            hq = h * group + g
            want = reference.attend(query[b, hq].double(), keys, values, dim**-0.5, softcap)
            bound = 1e-5 * (1 + (want[1].abs().item() if len(listed) else 0))
            torch.testing.assert_close(out[b, hq].double(), want[0], rtol=0, atol=bound)
            torch.testing.assert_close(lse[b, hq].double(), want[1], rtol=0, atol=bound)
            if kbar:
                torch.testing.assert_close(means[b, hq].double(), want[2], rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"tokens": np.array([0, 128], np.int32)}, ValueError, r"0\.\.128"),
        ({"tokens": np.array([-1, 0], np.int32)}, ValueError, r"-1\.\.0"),
        ({"tokens": np.array([0, 1], np.int64)}, TypeError, "int64"),
        ({"offsets": np.array([0, 3, 2], np.int64)}, ValueError, "ascend"),
        ({"offsets": np.array([0, 1, 1], np.int64)}, ValueError, "2 tokens"),
        ({"offsets": np.array([0], np.int64)}, ValueError, "offsets"),
    ],
)
def test_wrong_lists_are_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    query = np.zeros((1, 2, 64), np.float32)
    places = {"tokens": np.array([0, 1], np.int32), "offsets": np.array([0, 1, 2], np.int64)} | changes
    with pytest.raises(error, match=text):
        sparse_decode_tokens(
            query, np.zeros(4, np.int64), np.zeros((1, 4), np.int32), places["tokens"], places["offsets"], query.copy(),
            np.zeros((1, 2), np.float32), None, kv_dtype=torch.bfloat16, block_size=32, scale=1.0, softcap=None,
        )  # fmt: skip
