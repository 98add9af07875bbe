"""Lists of retained tokens against plain lists: whatever is added, cut, reordered, repeated, forked and let go."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from pools import used_blocks, used_bytes

from hf_offload.policies.hgca.retained_tokens import RetainedTokens

BLOCK, HEADS, DIM = 8, 2, 16
Token = tuple[int, bytes, bytes]


class Plain:
    """What a `RetainedTokens` must hold: for each row and KV head the tokens' positions, keys and values."""

    def __init__(self, lists: int) -> None:
        self.lists: list[list[Token]] = [[] for _ in range(lists)]
        self.stop = 0

    def copy(self) -> Plain:
        made = Plain(0)
        made.lists, made.stop = [list(each) for each in self.lists], self.stop
        return made


def empty(
    rows: int, dtype: torch.dtype = torch.float32, block_size: int = BLOCK, dim: int = DIM
) -> tuple[RetainedTokens, Plain]:
    return RetainedTokens(rows * HEADS, block_size, dim, dtype), Plain(rows * HEADS)


def bytes_of(vector: torch.Tensor) -> bytes:
    return vector.view(torch.uint8).numpy().tobytes()


def append(retained: RetainedTokens, plain: Plain, tokens: int, share: float, seed: int) -> None:
    """Add those of some tokens that are drawn, for each list."""
    drawn, rows, pool = torch.Generator().manual_seed(seed), len(plain.lists) // HEADS, retained.pool
    first, stop = plain.stop, plain.stop + tokens
    k, v = torch.randn(2, rows, HEADS, tokens, pool.block_shape[3], generator=drawn).to(pool.dtype)
    kept = np.zeros((rows, HEADS, stop), np.uint8)
    kept[:, :, first:] = torch.rand(rows, HEADS, tokens, generator=drawn).numpy() < share
    retained.append(k, v, kept, first)()
    for i, mine in enumerate(plain.lists):
        each = divmod(i, HEADS)
        mine += [(int(t), *(bytes_of(part[each][t - first]) for part in (k, v))) for t in np.flatnonzero(kept[each])]
    plain.stop = stop


def records(retained: RetainedTokens, index: int) -> list[tuple[bytes, bytes]]:
    """Keys and values of a list, as they lie in its blocks."""
    found: list[tuple[bytes, bytes]] = []
    slabs = {slab.data_ptr(): slab for slab in retained.pool.slabs}
    for block in retained.table[index, : retained.block_counts[index, 0]]:
        address = int(retained.pool.block_ptr[block])
        start = max(place for place in slabs if place <= address)
        k, v = slabs[start][(address - start) // retained.pool.block_bytes][0]
        found += [(bytes_of(key), bytes_of(value)) for key, value in zip(k, v, strict=True)]
    return found[: retained.counts[index]]


def check(retained: RetainedTokens, plain: Plain) -> None:
    assert retained.counts.tolist() == [len(each) for each in plain.lists]
    block = retained.pool.block_shape[2]
    for i, mine in enumerate(plain.lists):
        count = len(mine)
        assert retained.positions[i, :count].tolist() == [token[0] for token in mine]
        assert records(retained, i) == [token[1:] for token in mine]
        assert retained.block_counts[i, 0] == -(-count // block)
        assert retained.valid[i].sum() == retained.valid[i, :count].sum() == count
        full = count // block
        assert not retained.holes[i, :full].any()
        assert retained.holes[i, full:].all()


def check_pool(several: list[RetainedTokens]) -> None:
    """Every block is held as often as lists hold it, and by nobody otherwise."""
    for pool in {id(retained.pool): retained.pool for retained in several}.values():
        mine = [retained for retained in several if retained.pool is pool]
        held = [each.table[i, :n] for each in mine for i, n in enumerate(each.block_counts[:, 0])]
        ids, counts = np.unique(np.concatenate(held), return_counts=True)
        assert used_blocks(pool) == len(ids)
        assert np.array_equal(pool.refcount[ids], counts)


@pytest.mark.parametrize("seed", range(6))
def test_any_history_is_that_of_plain_lists(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    pairs = [empty(3)]
    for act in range(40):
        at = int(drawn.integers(len(pairs)))
        retained, plain = pairs[at]
        choice = drawn.choice(["append", "append", "truncate", "select", "fork", "drop", "clear"])
        if choice == "append":
            append(retained, plain, int(drawn.integers(1, 60)), float(drawn.choice([0.0, 0.1, 0.5, 1.0])), 100 * act)
        elif choice == "truncate":
            border = int(drawn.integers(plain.stop // 2, plain.stop + 1))
            retained.truncate(border)
            plain.lists = [[token for token in each if token[0] < border] for each in plain.lists]
            plain.stop = border
        elif choice == "select":
            rows = drawn.integers(0, len(plain.lists) // HEADS, int(drawn.integers(1, 5)))
            index = (rows[:, None] * HEADS + np.arange(HEADS)).ravel()
            retained.select_lists(index)
            plain.lists = [list(plain.lists[i]) for i in index]
        elif choice == "fork" and len(pairs) < 4:
            pairs.append((retained.fork(), plain.copy()))
        elif choice == "drop" and len(pairs) > 1:
            del pairs[at]
        elif choice == "clear" and drawn.random() < 0.2:
            retained.truncate(0)
            plain.lists = [[] for _ in plain.lists]
        del retained
        for pair in pairs:
            check(*pair)
        check_pool([pair[0] for pair in pairs])
    del pairs[:-1], pair
    gc.collect()
    last, _ = pairs[0]
    check_pool([last])
    assert used_bytes(last.pool) == last.nbytes


@pytest.mark.parametrize(
    ("dim", "block_size", "dtype"), [(64, 32, torch.bfloat16), (80, 8, torch.float16), (128, 16, torch.float32)]
)
def test_keys_and_values_of_every_dtype_are_appended(dim: int, block_size: int, dtype: torch.dtype) -> None:
    retained, plain = empty(2, dtype, block_size, dim)
    for part in range(2):  # the second one begins in a block of the first
        append(retained, plain, 150, 0.4, part)
    check(retained, plain)
