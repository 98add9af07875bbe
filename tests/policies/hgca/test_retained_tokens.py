"""Lists of retained tokens against plain lists: whatever is added, cut, reordered, repeated, forked and let go."""

from __future__ import annotations

import gc
from ctypes import string_at
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pools import used_blocks, used_bytes

from hf_offload.policies.hgca.retained_tokens import RetainedTokens

BLOCK, HEADS, DIM = 8, 2, 16
LINE = 4 * DIM


@dataclass
class Pair:
    """Lists, and what they must hold: for each row and KV head the tokens' positions, keys and values."""

    lists: RetainedTokens
    plain: list[list[tuple[int, bytes, bytes]]]
    stop: int = 0

    def fork(self) -> Pair:
        return Pair(self.lists.fork(), [list(each) for each in self.plain], self.stop)

    def append(self, tokens: int, share: float, seed: int) -> None:
        """Add those of some tokens that are drawn, for each list."""
        drawn, rows = torch.Generator().manual_seed(seed), len(self.plain) // HEADS
        first, self.stop = self.stop, self.stop + tokens
        kv = torch.randn(2, rows, HEADS, tokens, DIM, generator=drawn)
        kept = np.zeros((rows, HEADS, self.stop), np.uint8)
        kept[:, :, first:] = torch.rand(rows, HEADS, tokens, generator=drawn).numpy() < share
        self.lists.append(*kv, kept, first)()
        for i, mine in enumerate(self.plain):
            row, head = divmod(i, HEADS)
            k, v = (part[row, head].numpy() for part in kv)
            mine += [(int(t), k[t - first].tobytes(), v[t - first].tobytes()) for t in np.flatnonzero(kept[row, head])]

    def truncate(self, border: int) -> None:
        self.lists.truncate(border)
        self.plain = [[token for token in each if token[0] < border] for each in self.plain]

    def select(self, rows: np.ndarray) -> None:
        index = (rows[:, None] * HEADS + np.arange(HEADS)).ravel()
        self.lists.select_lists(index)
        self.plain = [list(self.plain[i]) for i in index]

    def check(self) -> None:
        lists, counts = self.lists, [len(each) for each in self.plain]
        assert lists.counts.tolist() == counts
        assert lists.block_counts[:, 0].tolist() == [-(-count // BLOCK) for count in counts]
        assert np.array_equal(lists.valid != 0, np.arange(lists.capacity) < np.reshape(counts, (-1, 1)))
        full = np.reshape(counts, (-1, 1)) // BLOCK
        assert np.array_equal(lists.holes != 0, np.arange(lists.capacity // BLOCK) >= full)
        for i, mine in enumerate(self.plain):
            blocks = lists.pool.block_ptr[lists.table[i]].tolist()
            for n, token in enumerate(mine):
                at = blocks[n // BLOCK] + n % BLOCK * LINE
                assert (lists.positions[i, n], string_at(at, LINE), string_at(at + BLOCK * LINE, LINE)) == token


def check_pool(several: list[RetainedTokens]) -> None:
    """Every block is held as often as lists hold it, and by nobody otherwise."""
    pool = several[0].pool
    held = [each.table[i, :n] for each in several for i, n in enumerate(each.block_counts[:, 0])]
    ids, counts = np.unique(np.concatenate(held), return_counts=True)
    assert used_blocks(pool) == len(ids)
    assert np.array_equal(pool.refcount[ids], counts)


@pytest.mark.parametrize("seed", range(4))
def test_any_history_is_that_of_plain_lists(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    pairs = [Pair(RetainedTokens(3 * HEADS, BLOCK, DIM, torch.float32), [[] for _ in range(3 * HEADS)])]
    pairs.append(pairs[0].fork())  # the pool is shared while it is empty
    for act in range(40):
        at = int(drawn.integers(len(pairs)))
        pair = pairs[at]
        choice = drawn.choice(["append", "append", "truncate", "select", "fork", "drop", "clear"])
        if choice == "append":
            pair.append(int(drawn.integers(1, 60)), float(drawn.choice([0.0, 0.1, 0.5, 1.0])), 100 * act)
        elif choice == "truncate":
            pair.truncate(int(drawn.integers(pair.stop // 2, pair.stop + 1)))
        elif choice == "select":
            pair.select(drawn.integers(0, len(pair.plain) // HEADS, int(drawn.integers(1, 5))))
        elif choice == "fork" and len(pairs) < 4:
            pairs.append(pair.fork())
        elif choice == "drop" and len(pairs) > 1:
            del pairs[at]
        elif choice == "clear" and drawn.random() < 0.2:
            pair.truncate(0)
        del pair
        for each in pairs:
            each.check()
        del each
        check_pool([each.lists for each in pairs])
    del pairs[:-1]
    gc.collect()
    check_pool([pairs[0].lists])
    assert used_bytes(pairs[0].lists.pool) == pairs[0].lists.nbytes
