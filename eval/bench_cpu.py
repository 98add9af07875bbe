"""How near are the CPU kernels to the speed of the memory?

    python eval/bench_cpu.py
    python eval/bench_cpu.py --sections linear --threads 2

Everything lies in pools much larger than the caches, and every call attends blocks that are chosen anew. The rows of a
section take turns; shown are medians with their 20th and 80th percentile. The limit is what a plain read of memory
reaches in the same turns. Section `linear` multiplies 1 to 8 rows with the weights of a few layers, one by one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numba
import numpy as np
import torch
import typer

import common
from hf_offload.blocks.host_pool import HostPool
from hf_offload.blocks.memory import host_empty
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.kernels.int8_blocks import Int8Records, packed_bytes
from hf_offload.cpu.kernels.linear import linear
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import Launch, LaunchSequence, tag_of

POOL_BYTES = 1 << 29  # far beyond the caches
READ_BYTES = 1 << 24  # of a read for the limit: as short as the calls it is compared with
SECTIONS = ("decode", "linear")
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


def take_turns(cases: Sequence[Case], rounds: int, section: str) -> list[dict[str, Any]]:
    """Time the cases in turns; one record a case, microseconds, and its share of the speed of the plain read."""
    times: list[list[float]] = [[] for _ in cases]
    for case in cases:
        case.prepare()()  # compiles
    for _, (place, case) in common.in_turns(list(enumerate(cases)), rounds):
        call = case.prepare()
        if isinstance(call, Launch):
            _ = call.bound  # laid out once for many steps
        start = time.perf_counter()
        call()
        times[place].append(1e6 * (time.perf_counter() - start))
    records: list[dict[str, Any]] = []
    for case, spent in zip(cases, times, strict=True):
        spread = common.percentiles(spent)
        speed = case.nbytes / spread["p50"] / 1e3 if case.nbytes else None
        records.append({"section": section, "case": case.name, **case.facts, **spread, "gb_per_s": speed})
    limit = next((r["gb_per_s"] for r in records if r["case"] == "read"), None)
    return [r | {"of_limit": r["gb_per_s"] and limit and r["gb_per_s"] / limit} for r in records]


def read_case(words: np.ndarray, threads: int, share: int, **facts: Any) -> Case:
    """A plain read on some threads, each of its share of 64-bit words, from elsewhere each time."""
    places = itertools.count()

    def prepare() -> Callable[[], None]:
        starts = [next(places) * share % (words.size - share + 1) for _ in range(threads)]

        def call() -> None:
            parts = [threading.Thread(target=read_words, args=(words[at : at + share],)) for at in starts[1:]]
            for part in parts:
                part.start()
            read_words(words[starts[0] : starts[0] + share])
            for part in parts:
                part.join()

        return call

    return Case("read", prepare, threads * share * 8, {"kernel_threads": threads} | facts)


class Memory:
    """A pool of blocks far larger than the caches, for one shape; packed: in int8."""

    def __init__(
        self, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, *, packed: bool = False, nbytes: int = 0
    ) -> None:
        self.kv_heads, self.dim, self.block_size, self.dtype = kv_heads, dim, block_size, dtype
        self.packed = packed
        record = 2 * kv_heads * block_size * dim * dtype.itemsize
        self.blocks = (nbytes or POOL_BYTES) // record
        pool = HostPool(kv_heads, block_size, dim, dtype, packed_bytes=packed_bytes(dim, block_size))
        pool.allocate(self.blocks, packed=packed)
        for slab in pool.packed_slabs if packed else pool.slabs:
            slab.view(torch.uint8).fill_(60)  # 0.01 in bf16 and fp32, 1.06 in fp16
        self.pool = pool
        self.rng = np.random.default_rng(0)

    def choose(self, batch: int, count: int) -> np.ndarray:
        """`[B, Hkv, count]` blocks, ascending, none twice."""
        picks = [self.rng.choice(self.blocks, count, replace=False) for _ in range(batch * self.kv_heads)]
        return np.sort(np.stack(picks), -1).reshape(batch, self.kv_heads, count).astype(np.int32)

    def decode(self, group: int, batch: int, budget: int, *, dense: bool = False) -> Launch:
        """One decode over `budget` tokens a row and KV head, scattered or (dense) one behind the other."""
        count, length = budget // self.block_size, self.blocks * self.block_size
        query = self.rng.standard_normal((batch, group * self.kv_heads, self.dim), dtype=np.float32)
        chosen = self.choose(batch, count)
        if dense:
            start = self.rng.integers(self.blocks - count)
            chosen[:] = np.arange(start, start + count)
        packed = Int8Records(packed_bytes(self.dim, self.block_size)) if self.packed else None
        holes, valid = np.zeros((batch, self.blocks), np.uint8), np.ones((batch, length), np.uint8)
        table = np.repeat(np.arange(self.blocks, dtype=np.int32)[None], batch, 0)
        blocks = HostBlocks(tag_of(self.dtype), self.pool.block_ptr, table, holes, valid, self.block_size, packed)
        return decode_attention(
            query, blocks, chosen, np.full(chosen.shape[:2], count, np.int32), length, np.empty_like(query),
            np.empty(query.shape[:2], np.float32), scale=self.dim**-0.5, softcap=None,
        )  # fmt: skip

    def bytes_of(self, batch: int, budget: int) -> int:
        """Bytes of the K and V that a call attends."""
        record = self.pool.packed_record_bytes if self.packed else self.pool.record_bytes
        return batch * budget // self.block_size * self.kv_heads * record


def decode_cases(name: str, threads: int, read: Case) -> Iterator[list[Case]]:
    """Sets of cases that take turns: head dimensions, groups, batches, block sizes."""
    dtype = DTYPES[name]

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


def linear_cases(model: str, name: str, threads: int, words: np.ndarray) -> Iterator[list[Case]]:
    """Ours against torch's `linear`, by rows: the products of so many layers of a model and its head, one by one."""
    hidden, mlp, kv, layers, vocabulary = WIDTHS[model]
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    shapes = [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp)] * layers
    shapes += [(vocabulary, hidden)] * (vocabulary > 0)
    weights = [torch.randn(shape).to(DTYPES[name]) for shape in shapes]
    nbytes = sum(weight.nbytes for weight in weights)
    facts = {"dtype": name, "model": model, "kernel_threads": threads}

    def theirs(inputs: dict[int, torch.Tensor]) -> Callable[[], Any]:
        multiply = torch.nn.functional.linear
        return torch.inference_mode()(lambda: [multiply(inputs[weight.shape[1]], weight) for weight in weights])

    def ours(inputs: dict[int, torch.Tensor]) -> Callable[[], Any]:
        outs = [torch.empty(len(inputs[w.shape[1]]), len(w), dtype=w.dtype) for w in weights]
        products = [
            LaunchSequence((linear(inputs[weight.shape[1]], weight, None, out, threads),))
            for weight, out in zip(weights, outs, strict=True)
        ]
        return lambda: [product.run() for product in products]

    for count in (1, 2, 4, 8):
        inputs = {width: torch.randn(count, width).to(DTYPES[name]) for width in (hidden, mlp)}
        ways = {"linear": ours(inputs), "torch: linear": theirs(inputs), "torch: linear again": theirs(inputs)}
        cases = [Case(way, lambda call=call: call, nbytes, facts | {"batch": count}) for way, call in ways.items()]
        share = min(words.size, nbytes // 8) // threads
        yield [read_case(words, threads, share, dtype=name, model=model, batch=count), *cases]


def main(
    sections: Annotated[str, typer.Option(help=f"Of {', '.join(SECTIONS)}.")] = ",".join(SECTIONS),
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = ",".join(DTYPES),
    threads: Annotated[str, typer.Option(help="Threads of decode and linear, comma-separated.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every row.")] = 30,
    out: common.OutOption = common.RESULTS / "bench_cpu.csv",
) -> None:
    """Measure the CPU kernels."""
    wanted, names = common.listed(sections, SECTIONS, "sections"), common.listed(dtypes, DTYPES, "dtypes")
    words = host_empty((POOL_BYTES // 8,), torch.int64).fill_(1).numpy().view(np.uint64)

    def read(parts: int = 1) -> Case:
        # Several threads read more, as starting them takes a while.
        return read_case(words, parts, READ_BYTES // 8 * (1 if parts == 1 else 4))

    records: list[dict[str, Any]] = []

    def measure(section: str, cases: Sequence[Case], count: int = 1) -> None:
        torch.set_num_threads(count)
        records.extend(take_turns(cases, rounds, section))
        common.write_csv(out, records)

    for name in names:
        for count in common.numbers(threads) if "decode" in wanted else ():
            for cases in decode_cases(name, count, read(count)):
                measure("decode", cases, count)
        for count in common.numbers(threads) if "linear" in wanted else ():
            torch.set_num_threads(count)
            for model in WIDTHS:
                for cases in linear_cases(model, name, count, words):
                    measure("linear", cases, count)
    for section in dict.fromkeys(r["section"] for r in records):
        mine = [r for r in records if r["section"] == section]
        columns = list(dict.fromkeys(k for r in mine for k in r if k != "section"))
        common.show(f"{section}: microseconds", mine, columns)


if __name__ == "__main__":
    common.command(main)()
