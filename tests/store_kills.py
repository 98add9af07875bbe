"""Processes that use a prefix store and are killed at random moments: what they leave gives no wrong token.

    python tests/store_kills.py FOLDER KILLS SEED

A child reads documents in chunks, answers, saves and evicts, and says after each forward how much it has read. It is
killed. Another child then opens the store: it must start, find all but one segment and one chunk of what was read, and
give the tokens of a cache without a store. The policy is `full` in float32.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from forks import forked, in_fork
from tiny import tiny_model

import hf_offload
from hf_offload.files import entries
from hf_offload.model.hooks import cache_argument

ANSWER = 6


SEGMENT, CHUNK = 64, 16
MOST = 600_000  # bytes: about three chats


class Work:
    """A model and prompts for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.lost = folder, 0, 0
        self.found: hf_offload.prefix_store.Found | None = None
        self.model: Any = tiny_model("llama")
        generator = torch.Generator().manual_seed(0)
        documents, questions = (
            [torch.randint(3, 160, (1, count), generator=generator) for count in counts]
            for counts in ((330, 411, 250), (5, 17, 40))
        )
        self.prompts = [torch.cat(pair, 1) for pair in itertools.product(documents, questions)]

    def store(self) -> hf_offload.PrefixStore:
        return hf_offload.PrefixStore(
            self.folder, self.model, "full", max_bytes=MOST, min_seconds=0, segment_tokens=SEGMENT
        )

    def answer(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, pad_token_id=0,
            **cache_argument(self.model, cache),
        )  # fmt: skip

    def use(self, pipe: int, order: random.Random) -> None:
        """Read and answer prompts without end; write prompt and tokens read to a pipe after each forward."""
        store, self.found = self.store(), None
        entries.evict = self.watched(pipe, entries.evict)
        while True:
            self.number = order.randrange(len(self.prompts))
            ids = self.prompts[self.number]
            with store.open(ids) as found:
                kept, self.found = found.cache.after_forward, found
                self.lost = max(found.tokens - self.on_disk(ids), 0)  # evicted, or not saved yet
                assert kept is not None

                def told(found: Any = found, kept: Any = kept) -> None:
                    read = found.cache.get_seq_length() if self.lost < SEGMENT else 0
                    os.write(pipe, f"{self.number} {read}\n".encode())
                    kept()

                found.cache.after_forward = told
                found.read(chunk=CHUNK)
                out = self.answer(ids, found.cache)
                if order.random() < 0.7:
                    found.keep(out)
                self.found = None
            if order.random() < 0.3:
                store.flush()

    def watched(self, pipe: int, evict: Callable[..., list[Path]]) -> Callable[..., list[Path]]:
        """`entries.evict`, which leaves what a prompt at work comes from, and may take what others have of it."""

        def run(folder: Path, most: int, keep: Collection[Path], drop: Collection[Path] = ()) -> list[Path]:
            found = self.found
            saved = None if found is None or found._entry is None else found._entry.saved()
            path = None if saved is None else saved.path
            before, self.lost = self.lost, SEGMENT  # nothing is claimed meanwhile
            os.write(pipe, f"{self.number} 0\n".encode())
            removed = evict(folder, most, keep, drop)
            if path in removed and path not in drop:
                os._exit(3)
            gone = 0 if found is None else found.tokens - self.on_disk(self.prompts[self.number])
            self.lost = max(before, gone)
            return removed

        return run

    def on_disk(self, ids: torch.Tensor) -> int:
        """The number of a prompt's tokens that an entry on disk holds."""
        have = [entries.read_tokens(path) for path in self.folder.glob("*/*") if path.is_dir()]
        wanted = ids[0].numpy()
        common = [(wanted[: len(each)] == each[: len(wanted)]).cumprod().sum() for each in have if each is not None]
        return int(max(common, default=0))

    def check(self, number: int, read: int, want: list[torch.Tensor], order: random.Random) -> None:
        """After a kill: a prompt of which so many tokens had been read, and another one."""
        store, damaged = self.store(), list[Path]()
        store._discard = damaged.append  # type: ignore[method-assign]
        listed = {entry.path for entry in entries.list_entries(self.folder) if entry.tokens}
        assert set(self.folder.glob("*/*")) - set(self.folder.glob("*/about.json")) == listed
        for which in (number, order.randrange(len(self.prompts))):
            ids = self.prompts[which]
            with store.open(ids) as found:
                assert not damaged, damaged
                least = min(read, ids.shape[1]) - SEGMENT - CHUNK
                assert which != number or found.tokens >= least, (found.tokens, read, listed)
                assert torch.equal(self.answer(ids, found.cache), want[which])
        store._held.clear()  # what this child has computed stays unsaved


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)  # no team of threads before a fork
    work, order = Work(folder), random.Random(seed)
    with torch.no_grad():
        want = [work.answer(ids, hf_offload.HybridCache(work.model, "full")) for ids in work.prompts]
    for kill in range(kills):
        wait = order.uniform(0.01, 1.2)
        number, read = one_kill(work, wait, random.Random(order.random()))
        ended = in_fork(lambda number=number, read=read: work.check(number, read, want, order), 3600.0)
        assert ended == 0, f"kill {kill}, after {wait:.3f} s"


def one_kill(work: Work, wait: float, order: random.Random) -> tuple[int, int]:
    """Kill a child some seconds after its first forward; the last prompt that it told, and the tokens read."""
    ours, theirs = os.pipe()
    child = forked(lambda: work.use(theirs, order))
    os.close(theirs)
    told, end = b"", time.monotonic() + 60.0
    while time.monotonic() < end:
        if select.select([ours], [], [], max(end - time.monotonic(), 0))[0]:
            more = os.read(ours, 1 << 16)
            if not told:
                end = time.monotonic() + wait
            told += more
            assert more, "the child has ended by itself"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told += os.read(ours, 1 << 20)
    os.close(ours)
    number, read = told.rpartition(b"\n")[0].rpartition(b"\n")[2].split()
    return int(number), int(read)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
