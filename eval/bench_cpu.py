"""How near are the CPU kernels to the speed of the memory?

    python eval/bench_cpu.py
    python eval/bench_cpu.py --sections decode,scoring --threads 1,2 --rounds 30
    python eval/bench_cpu.py --sections linear --threads 2

Everything lies in pools much larger than the caches, and every call attends blocks that are chosen anew. The rows of a
section take turns; shown are medians with their 20th and 80th percentile. The limit is what a plain read of memory,
torch's sum, reaches in the same turns. HF_OFFLOAD_ISA=avx2 chooses the instructions. `decode` attends blocks or drawn
pairs, `scoring` chooses blocks or draws pairs, `linear` multiplies 1 to 8 rows with the weights of a few layers, one by
one, as torch does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

import common
from hf_offload.blocks.digests import DIGESTS, DigestStore
from hf_offload.blocks.host_pool import HostPool
from hf_offload.blocks.memory import host_empty
from hf_offload.cpu.kernels import draw_pairs as drawing
from hf_offload.cpu.kernels.block_topk import choose_blocks
from hf_offload.cpu.kernels.decode_attention import Pairs, decode_attention
from hf_offload.cpu.kernels.int8_blocks import Int8Records, packed_bytes
from hf_offload.cpu.kernels.linear import linear
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import Launch, LaunchSequence, tag_of
from records import RESULTS, show, write_csv

POOL_BYTES = 1 << 29  # far beyond the caches
READ_BYTES = 1 << 24  # of a read for the limit: as short as the calls it is compared with
_WARM = torch.ones(256, 256)
# Hidden and MLP sizes, KV width, layers and vocabulary of models whose products are timed.
WIDTHS = {
    "SmolLM2-135M": (576, 1536, 192, 30, 49152),
    "Qwen2.5-0.5B": (896, 4864, 128, 10, 151936),
    "Llama-3.1-8B": (4096, 14336, 1024, 1, 0),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case(NamedTuple):
    """One row of a section: its name, what makes one call (untimed), the bytes that a call reads, and more columns."""

    name: str
    make: Callable[[], Callable[[], Any]]
    nbytes: int
    facts: dict[str, Any]


@torch.inference_mode()
def take_turns(cases: Sequence[Case], rounds: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Time cases in turns, a plain read first; one record a case, microseconds, and its share of the read's speed."""
    makers = {str(number): case.make for number, case in enumerate(cases)}
    records: list[dict[str, Any]] = []
    for case, seconds in zip(cases, common.time_in_turns(makers, rounds).values(), strict=True):
        spread = common.percentiles(1e6 * each for each in seconds)
        speed = case.nbytes / spread["p50"] / 1e3
        records.append({**facts, "case": case.name, **case.facts, **spread, "gb_per_s": speed})
    return [record | {"of_limit": record["gb_per_s"] / records[0]["gb_per_s"]} for record in records]


def read_case(nbytes: int = READ_BYTES, **facts: Any) -> Case:
    """The plain read of so many bytes on torch's team, on which the kernels run, too; each time of other ones."""
    words = host_empty((POOL_BYTES // 8,), torch.int64).fill_(1)
    parts = words.split(min(nbytes, POOL_BYTES) // 8)
    turns = itertools.cycle(parts[: len(parts) - 1] or parts)  # the last one is shorter
    return Case("read", lambda: next(turns).sum, parts[0].nbytes, facts)


def ready(launch: Launch) -> Callable[[], None]:
    """The call of a launch that is laid out in memory, its team awake from an operator before it, as in a model."""
    _WARM @ _WARM
    return LaunchSequence((launch,)).run


def host_blocks(
    dtype: torch.dtype, block_ptr: np.ndarray, table: np.ndarray, block_size: int, packed: Any = None
) -> HostBlocks:
    """All tokens of the blocks of a table `[B, N]`."""
    holes, valid = np.zeros(table.shape, np.uint8), np.ones((len(table), table.shape[1] * block_size), np.uint8)
    return HostBlocks(tag_of(dtype), block_ptr, table, holes, valid, block_size, packed)


class Memory:
    """A pool of blocks far larger than the caches, for one shape; packed: in int8."""

    def __init__(self, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, *, packed: bool = False) -> None:
        self.kv_heads, self.dim, self.block_size, self.dtype = kv_heads, dim, block_size, dtype
        self.packed = packed
        self.pool = HostPool(kv_heads, block_size, dim, dtype, packed_bytes=packed_bytes(dim, block_size))
        self.blocks = POOL_BYTES // (kv_heads * self.pool.record_bytes)
        self.pool.allocate(self.blocks, packed=packed)
        for slab in (*self.pool.slabs, *self.pool.packed_slabs):
            slab.view(torch.uint8).fill_(60)  # 0.01 in bf16 and fp32, 1.06 in fp16
        self.table = np.arange(self.blocks, dtype=np.int32)[None]
        self.rng = np.random.default_rng(0)

    def decode(self, group: int, batch: int, budget: int, *, dense: bool = False) -> Launch:
        """One decode over `budget` tokens a row and KV head, scattered or (dense) one behind the other."""
        count = budget // self.block_size
        span = count if dense else self.blocks
        blocks = np.full((batch, self.kv_heads, count), self.rng.integers(self.blocks - span + 1), np.int32)
        for row in blocks.reshape(-1, count):
            row += np.sort(self.rng.choice(span, count, replace=False)).astype(np.int32)
        return self._attention(self._query(group, batch), blocks, np.full(blocks.shape[:2], count, np.int32))

    def pairs(self, group: int, batch: int, budget: int) -> Launch:
        """One decode over `budget` tokens a KV head in scattered pairs, half of them drawn, of 8k chosen anew."""
        query, span = self._query(group, batch), 8192 // self.block_size
        start = int(self.rng.integers(self.blocks - span)) * self.block_size // 2
        lists = drawing.PairLists.of(batch, self.kv_heads, budget // 2)
        for row in lists.pairs.reshape(-1, budget // 2):
            row[:] = np.sort(self.rng.choice(8192 // 2, budget // 2, replace=False)) + start
        lists.weights[:] = self.rng.integers(0, 2, lists.weights.shape)
        lists.counts[:] = budget // 2
        return self._attention(query, lists.pairs, lists.counts, Pairs.of(lists.weights, query.shape[1]))

    def _attention(
        self, query: np.ndarray, items: np.ndarray, counts: np.ndarray, pairs: Pairs | None = None
    ) -> Launch:
        """Attention of some rows, each of which has all blocks."""
        packed = Int8Records(packed_bytes(self.dim, self.block_size)) if self.packed else None
        table, length = np.repeat(self.table, len(query), 0), self.blocks * self.block_size
        blocks = host_blocks(self.dtype, self.pool.block_ptr, table, self.block_size, packed)
        return decode_attention(
            query, blocks, items, counts, length, np.empty_like(query), np.empty(query.shape[:2], np.float32),
            scale=self.dim**-0.5, softcap=None, pairs=pairs,
        )  # fmt: skip

    def _query(self, group: int, batch: int) -> np.ndarray:
        return self.rng.standard_normal((batch, group * self.kv_heads, self.dim), dtype=np.float32)


def attention_case(memory: Memory, kind: str, group: int, batch: int = 1, budget: int = 2048) -> Case:
    """Attention of each row and KV head to `budget` tokens; `kind`: blocks, dense (consecutive ones) or pairs."""
    makers = {"blocks": memory.decode, "dense": partial(memory.decode, dense=True), "pairs": memory.pairs}
    record = memory.pool.packed_record_bytes if memory.packed else memory.pool.record_bytes
    nbytes = batch * budget // memory.block_size * memory.kv_heads * record
    facts = {"dim": memory.dim, "group": group, "batch": batch, "block_size": memory.block_size, "budget": budget}
    facts |= {"dtype": "int8"} if memory.packed else {}
    return Case(kind, lambda: ready(makers[kind](group, batch, budget)), nbytes, facts)


def decode_cases(name: str, threads: int) -> Iterator[list[Case]]:
    """Groups and batches, consecutive blocks, pairs, int8; then other head dimensions and block sizes."""
    packings = (False, True) if name == "bf16" else (False,)
    memories = [Memory(8, 128, 32, DTYPES[name], packed=packed) for packed in packings]
    yield [
        read_case(),
        *(attention_case(memories[0], "blocks", group, batch) for group, batch in ((3, 1), (7, 1), (4, 4))),
        *(attention_case(memory, kind, 4) for memory in memories for kind in ("blocks", "pairs")),
        attention_case(memories[0], "dense", 4, budget=8192),
    ]
    for dim, block_size in ((64, 32), (128, 16), (128, 64), (256, 32)):
        yield [read_case(), attention_case(Memory(8, dim, block_size, DTYPES[name]), "blocks", 4)]


def random_digests(
    kind: str, blocks: int, kv_heads: int, dim: int, *, block_size: int = 32, batch: int = 1, device: str = "cpu"
) -> DigestStore:
    """Digests of so many blocks, of random bits, none of which is an outlier."""
    store = DIGESTS[kind](kv_heads, dim, block_size, torch.device(device))
    store.reserve(blocks)
    for name, tensor in store.blocks.tensors.items():
        if name == "sizes":
            tensor.fill_(0x3D803D80)
        elif tensor.dtype is torch.float32:
            tensor.fill_(2**-7)
        else:
            tensor.view(torch.uint8).random_(256)
    for name, shape in store.statistics.items():
        setattr(store, name, torch.rand(batch, *shape, device=device))
    return store


def choice(store: DigestStore, query: np.ndarray, blocks: int) -> Callable[[np.ndarray], Launch]:
    """Makes the choice of 64 blocks of a table `[1, N]` by the scores of their digests."""
    (_, heads, dim), kv_heads = query.shape, store.num_kv_heads
    masses, tail = np.empty((1, heads, blocks + 16), np.float32), np.zeros((1, heads), np.float32)
    score, low = np.empty((1, kv_heads, blocks + 16), np.float32), np.zeros(1, np.int32)
    chosen, counts = np.empty((1, kv_heads, 64), np.int32), np.empty((1, kv_heads), np.int32)
    return lambda table: choose_blocks(
        query, store.arrays(query, dim**-0.5), table, blocks, masses, tail, score, join="max", scale=dim**-0.5,
        softcap=None, kv_dtype=torch.bfloat16, select=(low, low + 1, 4, blocks, 64, chosen, counts),
    )  # fmt: skip


def draw(store: DigestStore, query: np.ndarray, blocks: int, samples: int) -> Callable[[np.ndarray], Launch]:
    """Makes the draw of pairs from the digests of a table `[1, N]` of blocks of 32 tokens, all of which have some."""
    (_, heads, dim), kv_heads, pairs = query.shape, store.num_kv_heads, 16 * blocks
    room = min(drawing.most_pairs(samples, heads // kv_heads, pairs) + 64, pairs)
    lists, low = drawing.PairLists.of(1, kv_heads, room), np.zeros(1, np.int32)
    masses = np.empty((1, heads, drawing.kept_masses(blocks, 16)), drawing.MASSES)
    nowhere = np.zeros(store.capacity, np.int64)
    return lambda table: drawing.draw_pairs(
        query, store.arrays(query, dim**-0.5), table, drawing.Always(low, low + 16, 16),
        drawing.Thresholds.of(0, low, pairs), masses, lists, n_sealed=blocks, length=32 * blocks, samples=samples,
        join="max", scale=dim**-0.5, softcap=None, unsealed=host_blocks(torch.bfloat16, nowhere, table, 32),
    )  # fmt: skip


def scoring_cases(name: str, threads: int) -> Iterator[list[Case]]:
    """The choice of blocks and the draw of pairs in contexts of 8k, 32k and 128k tokens; of no dtype."""
    cases, query = [read_case()], np.random.default_rng(0).standard_normal((1, 32, 128), dtype=np.float32)
    for kind, blocks in itertools.product(("submean", "quest"), (256, 1024, 4096)):
        nbytes = blocks * DIGESTS[kind](8, 128, 32, torch.device("cpu")).block_bytes
        copies = max(2, POOL_BYTES // 4 // nbytes)
        store = random_digests(kind, copies * blocks, 8, 128)
        tables = itertools.cycle(np.arange(copies * blocks, dtype=np.int32).reshape(copies, 1, blocks))
        ways = [("choose_blocks", None, choice(store, query, blocks))]
        if kind == "submean":
            ways += [("draw_pairs", samples, draw(store, query, blocks, samples)) for samples in (128, 512)]
        for case, samples, launch in ways:
            facts = {"dtype": None, "digest": kind, "dim": 128, "group": 4, "context": 32 * blocks, "samples": samples}
            cases.append(Case(case, lambda launch=launch, tables=tables: ready(launch(next(tables))), nbytes, facts))
    yield cases


def run_all(calls: Sequence[Callable[[], Any]]) -> None:
    """Make some calls, one by one."""
    for call in calls:
        call()


def linear_cases(name: str, threads: int) -> Iterator[list[Case]]:
    """Ours against torch's `linear`: the products of so many layers of a model and its head, one by one, by rows."""
    for model, (hidden, mlp, kv, layers, vocabulary) in WIDTHS.items():
        attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
        shapes = [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp)] * layers
        shapes += [(vocabulary, hidden)] * (vocabulary > 0)
        weights = [torch.randn(shape).to(DTYPES[name]) for shape in shapes]
        nbytes = sum(weight.nbytes for weight in weights)
        for count in (1, 2, 4, 8):
            inputs = {width: torch.randn(count, width).to(DTYPES[name]) for width in (hidden, mlp)}
            products = [(inputs[weight.shape[1]], weight) for weight in weights]
            launches = [linear(x, weight, None, x.new_empty(count, len(weight)), threads) for x, weight in products]
            ours = [LaunchSequence((launch,)).run for launch in launches]
            theirs = [partial(torch.nn.functional.linear, *product) for product in products]
            facts = {"model": model, "batch": count}
            yield [
                read_case(nbytes, **facts),
                Case("linear", lambda calls=ours: partial(run_all, calls), nbytes, facts),
                Case("torch: linear", lambda calls=theirs: partial(run_all, calls), nbytes, facts),
                Case("torch: linear again", lambda calls=theirs: partial(run_all, calls), nbytes, facts),
            ]


SECTIONS = {"decode": decode_cases, "scoring": scoring_cases, "linear": linear_cases}


def main(
    sections: Annotated[str, typer.Option(help=f"Of {', '.join(SECTIONS)}.")] = ",".join(SECTIONS),
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = ",".join(DTYPES),
    threads: Annotated[str, typer.Option(help="Threads, comma-separated.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every row.")] = 30,
    out: common.OutOption = RESULTS / "bench_cpu.csv",
) -> None:
    """Measure the CPU kernels."""
    wanted, names = common.listed(sections, SECTIONS, "sections"), common.listed(dtypes, DTYPES, "dtypes")
    records: list[dict[str, Any]] = []
    for section in wanted:
        mine: list[dict[str, Any]] = []
        for name, count in itertools.product(names[:1] if section == "scoring" else names, common.numbers(threads)):
            torch.set_num_threads(count)
            for cases in SECTIONS[section](name, count):
                mine += take_turns(cases, rounds, {"section": section, "kernel_threads": count, "dtype": name})
                write_csv(out, [*records, *mine])
        records += mine
        show(f"{section}: microseconds", mine)


if __name__ == "__main__":
    common.command(main)()
