"""How near are the CPU kernels to the speed of the memory, and how far ahead of the best that torch offers?

    python eval/bench_cpu.py
    python eval/bench_cpu.py --sections decode,torch --threads 1,2 --rounds 30
    python eval/bench_cpu.py --sections linear --threads 2

Everything lies in pools much larger than the caches, and every call attends blocks that are chosen anew. The rows of a
section take turns; shown are medians with their 20th and 80th percentile. The limit is what a plain read of memory
reaches in the same turns. Section `pairs` draws keys and attends them; HF_OFFLOAD_ISA=avx2 chooses the instructions.
Section `linear` multiplies 1 to 8 rows with the weights of a few layers, one by one.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import numba
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


@numba.njit(nogil=True)
def read_words(words: np.ndarray) -> int:
    """Read an array of uint64 from end to end: the plain read that kernels are compared with."""
    total = np.uint64(0)
    for word in words:
        total ^= word
    return total


@dataclass(frozen=True)
class Case:
    """One row of a section.

    Attributes:
        name: what is measured.
        prepare: makes one call, untimed.
        nbytes: bytes that a call has to read.
        facts: columns that describe it.
    """

    name: str
    prepare: Callable[[], Callable[[], Any]]
    nbytes: int
    facts: dict[str, Any]


Sets = Iterator[list[Case]]
"""Sets of cases that take turns; a plain read comes first."""


@torch.inference_mode()
def take_turns(cases: Sequence[Case], rounds: int, section: str) -> list[dict[str, Any]]:
    """Time the cases in turns; one record a case, microseconds, and its share of the speed of the plain read."""

    def prepared(case: Case) -> Callable[[], Any]:
        call = case.prepare()
        if isinstance(call, Launch):
            _ = call.bound  # laid out once for many steps
        return call

    makers = {str(number): partial(prepared, case) for number, case in enumerate(cases)}
    records: list[dict[str, Any]] = []
    for case, seconds in zip(cases, common.time_in_turns(makers, rounds).values(), strict=True):
        spread = common.percentiles(1e6 * each for each in seconds)
        speed = case.nbytes / spread["p50"] / 1e3 if case.nbytes else None
        records.append({"section": section, "case": case.name, **case.facts, **spread, "gb_per_s": speed})
    limit = records[0]["gb_per_s"]
    return [r | {"of_limit": r["gb_per_s"] and r["gb_per_s"] / limit} for r in records]


@cache
def words_to_read() -> np.ndarray:
    """The memory of the plain read."""
    return host_empty((POOL_BYTES // 8,), torch.int64).fill_(1).numpy().view(np.uint64)


def read_case(nbytes: int, threads: int, **facts: Any) -> Case:
    """The plain read of so many bytes by some threads at once, each time of other ones."""
    words, places = words_to_read(), itertools.count()
    size = min(nbytes // 8, words.size) // threads

    def read() -> None:
        first = next(places) * size % max(words.size - size, 1)
        read_words(words[first : first + size])

    def call() -> None:
        others = [threading.Thread(target=read) for _ in range(threads - 1)]
        for other in others:
            other.start()
        read()
        for other in others:
            other.join()

    return Case("read", lambda: call, threads * size * 8, facts | {"kernel_threads": threads})


def limit_case(threads: int = 1) -> Case:
    """The plain read for kernels; several threads read more, as starting them takes a while."""
    return read_case(READ_BYTES * (1 if threads == 1 else 4 * threads), threads)


class Memory:
    """A pool of blocks far larger than the caches, for one shape; packed: in int8."""

    def __init__(self, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, *, packed: bool = False) -> None:
        self.kv_heads, self.dim, self.block_size, self.dtype = kv_heads, dim, block_size, dtype
        self.packed = packed
        record = 2 * kv_heads * block_size * dim * dtype.itemsize
        self.blocks = POOL_BYTES // record
        pool = HostPool(kv_heads, block_size, dim, dtype, packed_bytes=packed_bytes(dim, block_size))
        pool.allocate(self.blocks, packed=packed)
        for slab in pool.packed_slabs if packed else pool.slabs:
            slab.view(torch.uint8).fill_(60)  # 0.01 in bf16 and fp32, 1.06 in fp16
        self.pool = pool
        self.table = np.arange(self.blocks, dtype=np.int32)[None]
        self.rng = np.random.default_rng(0)

    def choose(self, batch: int, count: int) -> np.ndarray:
        """`[B, Hkv, count]` blocks, ascending, none twice."""
        picks = [self.rng.choice(self.blocks, count, replace=False) for _ in range(batch * self.kv_heads)]
        return np.sort(np.stack(picks), -1).reshape(batch, self.kv_heads, count).astype(np.int32)

    def decode(self, group: int, batch: int, budget: int, *, dense: bool = False) -> Launch:
        """One decode over `budget` tokens a row and KV head, scattered or (dense) one behind the other."""
        count = budget // self.block_size
        query = self._query(group, batch)
        blocks = self.choose(batch, count)
        if dense:
            start = self.rng.integers(self.blocks - count)
            blocks[:] = np.arange(start, start + count)
        counts = np.full(blocks.shape[:2], count, np.int32)
        return self._attention(query, blocks, counts)

    def _attention(
        self, query: np.ndarray, items: np.ndarray, counts: np.ndarray, pairs: Pairs | None = None
    ) -> Launch:
        """Attention of some rows, each of which has all blocks."""
        blocks, length = self._host_blocks(np.repeat(self.table, len(query), 0)), self.blocks * self.block_size
        return decode_attention(
            query, blocks, items, counts, length, np.empty_like(query), np.empty(query.shape[:2], np.float32),
            scale=self.dim**-0.5, softcap=None, pairs=pairs,
        )  # fmt: skip

    def pairs(self, group: int, tokens: int, context: int) -> Launch:
        """One decode over so many tokens a KV head in scattered pairs, half of them drawn, of a context chosen anew."""
        query, span = self._query(group, 1), context // self.block_size
        start = int(self.rng.integers(self.blocks - span)) * self.block_size // 2
        lists = drawing.PairLists.of(1, self.kv_heads, tokens // 2)
        for h in range(self.kv_heads):
            lists.pairs[0, h] = np.sort(self.rng.choice(context // 2, tokens // 2, replace=False)) + start
        lists.weights[:] = self.rng.integers(0, 2, lists.weights.shape)
        lists.counts[:] = tokens // 2
        return self._attention(query, lists.pairs, lists.counts, Pairs.of(lists.weights, query.shape[1]))

    def draw(self, group: int, store: DigestStore, context: int, samples: int) -> Launch:
        """One draw from the digests of a context."""
        blocks, size = context // self.block_size, self.block_size // 2
        query, room = self._query(group, 1), min(drawing.most_pairs(samples, group, blocks * size) + 64, blocks * size)
        masses = np.empty((1, group * self.kv_heads, drawing.kept_masses(blocks, size)), drawing.MASSES)
        low, table = np.zeros(1, np.int32), self.table[:, :blocks].copy()
        digest, thresholds = store.arrays(query, self.dim**-0.5), drawing.Thresholds.of(0, low, blocks * size)
        return drawing.draw_pairs(
            query, digest, table, drawing.Always(low, low + 16, 16), thresholds, masses,
            drawing.PairLists.of(1, self.kv_heads, room), n_sealed=blocks, length=context, samples=samples, join="max",
            scale=self.dim**-0.5, softcap=None, unsealed=self._host_blocks(table),
        )  # fmt: skip

    def _host_blocks(self, table: np.ndarray) -> HostBlocks:
        """All tokens of the blocks of a table `[B, N]`."""
        packed = Int8Records(packed_bytes(self.dim, self.block_size)) if self.packed else None
        holes = np.zeros(table.shape, np.uint8)
        valid = np.ones((len(table), table.shape[1] * self.block_size), np.uint8)
        return HostBlocks(tag_of(self.dtype), self.pool.block_ptr, table, holes, valid, self.block_size, packed)

    def _query(self, group: int, batch: int) -> np.ndarray:
        return self.rng.standard_normal((batch, group * self.kv_heads, self.dim), dtype=np.float32)

    def bytes_of(self, batch: int, budget: int) -> int:
        """Bytes of the K and V that a call attends."""
        record = self.pool.packed_record_bytes if self.packed else self.pool.record_bytes
        return batch * budget // self.block_size * self.kv_heads * record


def decode_cases(name: str, threads: int) -> Sets:
    """Head dimensions, groups, batches, block sizes."""
    dtype, read = DTYPES[name], limit_case(threads)

    def case(memory: Memory, group: int, batch: int, budget: int, kind: str = "blocks") -> Case:
        def prepare() -> Callable[[], Any]:
            launch = memory.decode(group, batch, budget, dense=kind == "dense")
            if threads == 1:
                return launch
            _WARM @ _WARM  # in a model, an operator before has the team awake
            return launch.run

        facts = {
            "dtype": "int8" if memory.packed else name, "dim": memory.dim, "group": group, "batch": batch,
            "block_size": memory.block_size, "budget": budget, "kernel_threads": threads,
        }  # fmt: skip
        return Case(kind, prepare, memory.bytes_of(batch, budget), facts)

    memory = Memory(8, 128, 32, dtype)
    packed = [case(Memory(8, 128, 32, dtype, packed=True), 4, 1, 2048)] if name == "bf16" else []
    yield [
        read,
        *(case(memory, group, batch, 2048) for group, batch in ((4, 1), (3, 1), (7, 1), (4, 4))),
        *packed,
        case(memory, 4, 1, 8192, "dense"),
    ]
    for dim, block in ((64, 32), (128, 16), (128, 64), (256, 32)):
        yield [read, case(Memory(8, dim, block, dtype), 4, 1, 2048)]


def torch_cases(name: str, threads: int) -> Sets:
    """Ours against torch's ways, the gather of the chosen blocks counted."""
    memory, group, budget = Memory(8, 128, 32, DTYPES[name]), 4, 2048
    slab, heads = memory.pool.slabs[0], torch.arange(memory.kv_heads)[:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sdpa with the group as rows": lambda q, k, v: sdpa(q[None], k[None], v[None]),
        "matmul, softmax, matmul": lambda q, k, v: (q @ k.mT * memory.dim**-0.5).float().softmax(-1).to(v.dtype) @ v,
        "sdpa with enable_gqa": lambda q, k, v: sdpa(
            q.reshape(1, -1, 1, memory.dim), k[None], v[None], enable_gqa=True
        ),
    }

    def prepare(attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        query = torch.randn(memory.kv_heads, group, memory.dim, dtype=memory.dtype)
        blocks = torch.from_numpy(memory.choose(1, budget // memory.block_size)[0].astype(np.int64))

        def call() -> torch.Tensor:
            both = slab[blocks, heads]  # [Hkv, count, 2, block, D]
            return attend(query, both[:, :, 0].flatten(1, 2), both[:, :, 1].flatten(1, 2))

        return call

    nbytes, facts = memory.bytes_of(1, budget), {"dtype": name, "dim": 128, "group": group, "kernel_threads": 1}
    yield [
        limit_case(),
        Case("blocks", lambda: memory.decode(group, 1, budget), nbytes, facts),
        *(Case(f"torch: gather, {way}", partial(prepare, attend), nbytes, facts) for way, attend in ways.items()),
    ]


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


def pair_cases(name: str, threads: int) -> Sets:
    """The draw of pairs and attention to them, beside as many and twice as many tokens in blocks."""
    isa = os.environ.get("HF_OFFLOAD_ISA", "own")
    for kv_heads, group, dim in ((3, 3, 64), (8, 4, 128)):
        kinds = (False, True) if name == "bf16" else (False,)
        memories = [Memory(kv_heads, dim, 32, DTYPES[name], packed=packed) for packed in kinds]
        cases = [limit_case()]
        for memory in memories:
            facts = {"dtype": "int8" if memory.packed else name, "dim": dim, "group": group, "isa": isa}
            facts |= {"batch": 1, "block_size": 32, "kernel_threads": 1}
            for tokens in (512, 1024):
                ways = {"pairs": partial(memory.pairs, group, tokens, 8192)}
                ways["blocks"] = partial(memory.decode, group, 1, tokens)
                nbytes, more = memory.bytes_of(1, tokens), facts | {"budget": tokens}
                cases += [Case(kind, make, nbytes, more) for kind, make in ways.items()]
        for context in (each for each in (8192, 32768) if each <= 32 * memories[0].blocks):
            store = random_digests("submean", context // 32, kv_heads, dim)
            for samples in (128, 512):
                draw = partial(memories[0].draw, group, store, context, samples)
                more = {"dim": dim, "group": group, "isa": isa, "context": context, "samples": samples}
                cases.append(Case("draw_pairs", draw, 0, more | {"kernel_threads": 1}))
        yield cases


def scoring_cases(name: str, threads: int) -> Sets:
    """Digest scoring with join and selection, over contexts of 8k, 32k and 128k tokens; of no dtype."""
    rng = np.random.default_rng(0)
    kv_heads, group, dim, count = 8, 4, 128, 64

    def case(kind: str, blocks: int) -> Case:
        nbytes = blocks * DIGESTS[kind](kv_heads, dim, 32, torch.device("cpu")).block_bytes
        copies = max(2, POOL_BYTES // 4 // nbytes)
        store = random_digests(kind, copies * blocks, kv_heads, dim)
        query = rng.standard_normal((1, kv_heads * group, dim), dtype=np.float32)
        masses = np.empty((1, kv_heads * group, blocks + 16), np.float32)
        score, tail = np.empty((1, kv_heads, blocks + 16), np.float32), np.zeros((1, kv_heads * group), np.float32)
        low = np.zeros(1, np.int32)
        chosen, counts = np.empty((1, kv_heads, count), np.int32), np.empty((1, kv_heads), np.int32)
        digest = store.arrays(query, dim**-0.5)
        tables = itertools.cycle(np.arange(copies * blocks, dtype=np.int32).reshape(copies, 1, blocks))

        def prepare() -> Launch:
            table = next(tables)
            return choose_blocks(
                query, digest, table, blocks, masses, tail, score, join="max", scale=dim**-0.5, softcap=None,
                kv_dtype=torch.bfloat16, select=(low, low + 1, 4, blocks, count, chosen, counts),
            )  # fmt: skip

        facts = {"digest": kind, "dim": dim, "group": group, "context": 32 * blocks, "kernel_threads": 1}
        return Case("choose_blocks", prepare, nbytes, facts)

    yield [limit_case(), *(case(kind, blocks) for kind in ("submean", "quest") for blocks in (256, 1024, 4096))]


def linear_cases(name: str, threads: int) -> Sets:
    """Ours against torch's `linear`, by model and rows."""
    for model in WIDTHS:
        yield from products_of(model, name, threads)


def products_of(model: str, name: str, threads: int) -> Sets:
    """The products of so many layers of a model and its head, one by one."""
    hidden, mlp, kv, layers, vocabulary = WIDTHS[model]
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    shapes = [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp)] * layers
    shapes += [(vocabulary, hidden)] * (vocabulary > 0)
    weights = [torch.randn(shape).to(DTYPES[name]) for shape in shapes]
    nbytes = sum(weight.nbytes for weight in weights)
    facts = {"dtype": name, "model": model}

    def theirs(inputs: dict[int, torch.Tensor]) -> Callable[[], Any]:
        return lambda: [torch.nn.functional.linear(inputs[weight.shape[1]], weight) for weight in weights]

    def ours(inputs: dict[int, torch.Tensor]) -> Callable[[], Any]:
        each = []
        for weight in weights:
            rows = inputs[weight.shape[1]]
            out = torch.empty(len(rows), len(weight), dtype=weight.dtype)
            each.append(LaunchSequence((linear(rows, weight, None, out, threads),)))
        return lambda: [sequence.run() for sequence in each]

    for count in (1, 2, 4, 8):
        inputs = {width: torch.randn(count, width).to(DTYPES[name]) for width in (hidden, mlp)}
        more = {**facts, "batch": count, "kernel_threads": threads}
        ways = {"linear": ours(inputs), "torch: linear": theirs(inputs), "torch: linear again": theirs(inputs)}
        cases = [Case(way, lambda call=call: call, nbytes, more) for way, call in ways.items()]
        yield [read_case(nbytes, threads, **facts, batch=count), *cases]


SECTIONS: dict[str, Callable[[str, int], Sets]] = {
    "decode": decode_cases, "torch": torch_cases, "scoring": scoring_cases, "linear": linear_cases, "pairs": pair_cases,
}  # fmt: skip
THREADED = ("decode", "linear")


def main(
    sections: Annotated[str, typer.Option(help=f"Of {', '.join(SECTIONS)}.")] = ",".join(SECTIONS),
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = ",".join(DTYPES),
    threads: Annotated[str, typer.Option(help="Threads of decode and linear, comma-separated.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every row.")] = 30,
    out: common.OutOption = common.RESULTS / "bench_cpu.csv",
) -> None:
    """Measure the CPU kernels."""
    wanted, names = common.listed(sections, SECTIONS, "sections"), common.listed(dtypes, DTYPES, "dtypes")
    records: list[dict[str, Any]] = []
    for name, section in itertools.product(names, wanted):
        if section == "scoring" and name != names[0]:
            continue
        for count in common.numbers(threads) if section in THREADED else [1]:
            torch.set_num_threads(count)
            for cases in SECTIONS[section](name, count):
                records += take_turns(cases, rounds, section)
                common.write_csv(out, records)
    for section in dict.fromkeys(r["section"] for r in records):
        mine = [r for r in records if r["section"] == section]
        columns = list(dict.fromkeys(k for r in mine for k in r if k != "section"))
        common.show(f"{section}: microseconds", mine, columns)


if __name__ == "__main__":
    common.command(main)()
