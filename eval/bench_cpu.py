"""The CPU kernels against the speed of the memory and against the best that torch offers, in one run.

    python eval/bench_cpu.py
    python eval/bench_cpu.py --sections decode,torch --threads 1,2 --rounds 30

Everything lies in pools much larger than the caches, and every call attends blocks that are chosen anew. The rows of a
section take turns; shown are medians with their 20th and 80th percentile. The limit is what a plain read of memory
reaches in the same turns: compiled C where a compiler is present, else Numba.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import numba
import numpy as np
import torch
import typer
from tqdm import tqdm

from common import RESULTS, OutOption, command, percentiles, show, write_csv
from hf_offload.cache.host_pool import HostPool
from hf_offload.cache.memory import host_empty
from hf_offload.cpu.kernels.block_topk import choose_blocks, select_blocks
from hf_offload.cpu.kernels.digest_scores import Digest, Vectors
from hf_offload.cpu.kernels.int8_blocks import packed_bytes
from hf_offload.cpu.kernels.move_records import touch_records
from hf_offload.cpu.kernels.sparse_decode import sparse_decode
from hf_offload.cpu.kernels.submean_scores import submeans
from hf_offload.cpu.launch import SHARE_BYTES, Launch
from hf_offload.cpu.thread_pool import Worker

POOL_BYTES = 1 << 29  # far beyond the caches
READ_BYTES = 1 << 24  # of a read for the limit: as short as the calls it is compared with
SECTIONS = ("decode", "torch", "scoring", "selection", "worker")
_WARM = torch.ones(256, 256)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

READ_C = """
#include <stddef.h>
#include <stdint.h>
uint64_t read_words(const uint64_t *p, size_t n) {
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) sum[k] ^= p[i + k];
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}
uint64_t read_runs(const uint64_t *const *runs, size_t count, size_t n) {
    uint64_t total = 0;
    for (size_t r = 0; r < count; r++) {
        const uint64_t *p = runs[r], *next = runs[r + 1 < count ? r + 1 : r];
        uint64_t sum[8] = {0};
        for (size_t i = 0; i + 8 <= n; i += 8) {
            __builtin_prefetch(next + i);
            for (int k = 0; k < 8; k++) sum[k] ^= p[i + k];
        }
        for (int k = 0; k < 8; k++) total ^= sum[k];
    }
    return total;
}
"""


HAND_OVER_C = """
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>
static _Alignas(64) atomic_int asked;
static _Alignas(64) atomic_int answered;
static void *serve(void *unused) {
    for (int seen = 0;; atomic_store(&answered, ++seen))
        while (atomic_load(&asked) == seen) syscall(SYS_futex, &asked, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    return unused;
}
void start_server(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, serve, NULL);
}
void hand_over(void) {
    int before = atomic_load(&answered);
    atomic_fetch_add(&asked, 1);
    syscall(SYS_futex, &asked, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    while (atomic_load(&answered) == before) {}
}
"""


@numba.njit(nogil=True)
def _read_words(words: np.ndarray) -> int:  # type: ignore[type-arg]
    total = np.uint64(0)
    for word in words:
        total ^= word
    return total


def _built(compiler: str, source: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "limit.c").write_text(source)
    library = str(folder / "limit.so")
    options = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *options, "-o", library, folder / "limit.c"], check=True)
    return ctypes.CDLL(library)


class Reader:
    """The machine's limits: plain reads of memory, in C where there is a compiler, else Numba; hand-overs, in C."""

    def __init__(self) -> None:
        compiler = shutil.which("cc")
        self.way = "numba" if compiler is None else "C"
        if compiler is not None:
            self._c = _built(compiler, READ_C)
            self._c.read_words.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            self._c.read_runs.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def server(self) -> Callable[[], Any] | None:
        """Hands nothing over to a thread that sleeps and waits, spinning, for the answer; None where C cannot."""
        if self.way != "C" or sys.platform != "linux":
            return None
        library = _built(str(shutil.which("cc")), HAND_OVER_C)
        library.start_server()
        return cast(Callable[[], Any], library.hand_over)

    def words(self, words: np.ndarray) -> None:  # type: ignore[type-arg]
        """Read an array of uint64 from end to end."""
        if self.way == "C":
            self._c.read_words(words.ctypes.data, words.size)
        else:
            _read_words(words)

    def runs(self, addresses: np.ndarray, nbytes: int) -> None:  # type: ignore[type-arg]
        """Read runs of `nbytes` at int64 addresses, the next one prefetched meanwhile; C only."""
        self._c.read_runs(addresses.ctypes.data, addresses.size, nbytes // 8)


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


def take_turns(cases: Sequence[Case], rounds: int, label: str) -> list[dict[str, Any]]:
    """Time the cases in turns; one record a case, microseconds."""
    times: dict[int, list[float]] = {i: [] for i in range(len(cases))}
    for case in cases:
        case.prepare()()  # compiles
    for _ in tqdm(range(rounds), desc=label, leave=False):
        for i, case in enumerate(cases):
            call = case.prepare()
            start = time.perf_counter()
            call()
            times[i].append((time.perf_counter() - start) * 1e6)
    records = []
    for i, case in enumerate(cases):
        spread = percentiles(times[i])
        speed = case.nbytes / spread["p50"] / 1e3 if case.nbytes else None
        records.append({"section": label, "case": case.name, **case.facts, **spread, "gb_per_s": speed})
    return records


def on_threads(work: Callable[[], Any], threads: int) -> Callable[[], Any]:
    """A call that runs `work` on several threads at once."""

    def call() -> None:
        others = [threading.Thread(target=work) for _ in range(threads - 1)]
        for other in others:
            other.start()
        work()
        for other in others:
            other.join()

    return call


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

    def choose(self, batch: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
        """`[B, Hkv, count]` blocks, ascending, none twice."""
        picks = [self.rng.choice(self.blocks, count, replace=False) for _ in range(batch * self.kv_heads)]
        return np.sort(np.stack(picks), -1).reshape(batch, self.kv_heads, count).astype(np.int32)

    def decode(self, group: int, batch: int, budget: int, *, dense: bool = False, prefetch: bool = True) -> Launch:
        """One decode over `budget` tokens a row and KV head, scattered or (dense) one behind the other."""
        count = budget // self.block_size
        query = self._query(group, batch)
        blocks = self.choose(batch, count)
        if dense:
            start = self.rng.integers(self.blocks - count)
            blocks[:] = np.arange(start, start + count)
        length = self.blocks * self.block_size
        return sparse_decode(
            query, self.pool.block_ptr, np.repeat(self.table, batch, 0), blocks,
            np.full(blocks.shape[:2], count, np.int32), np.zeros((batch, self.blocks), np.uint8),
            np.ones((batch, length), np.uint8), length, np.empty_like(query), np.empty(query.shape[:2], np.float32),
            None, kv_dtype=self.dtype, block_size=self.block_size, scale=self.dim**-0.5, softcap=None,
            packed=self.packed, prefetch=prefetch,
        )  # fmt: skip

    def _query(self, group: int, batch: int) -> np.ndarray:  # type: ignore[type-arg]
        return self.rng.standard_normal((batch, group * self.kv_heads, self.dim), dtype=np.float32)

    def addresses(self, batch: int, budget: int) -> np.ndarray:  # type: ignore[type-arg]
        """Where the K and V lie that a decode over `budget` tokens might choose: int64, in the kernel's order."""
        record = 2 * self.block_size * self.dim * self.dtype.itemsize
        blocks = self.choose(batch, budget // self.block_size)
        return (self.pool.block_ptr[blocks] + record * np.arange(self.kv_heads)[:, None]).ravel()

    def bytes_of(self, batch: int, budget: int) -> int:
        """Bytes of the K and V that a call attends."""
        record = self.pool.packed_record_bytes if self.packed else self.pool.record_bytes
        return batch * budget // self.block_size * self.kv_heads * record


def decode_cases(name: str, threads: int, read: Case, reader: Reader) -> Iterator[list[Case]]:
    """Sets of cases that take turns: head dimensions, groups, batches, block sizes; and their bare reads."""
    dtype = DTYPES[name]

    def case(memory: Memory, group: int, batch: int, budget: int, kind: str = "sparse_decode") -> Case:
        def prepare() -> Callable[[], Any]:
            launch = memory.decode(group, batch, budget, dense=kind == "dense", prefetch=kind != "no prefetch")
            if threads == 1:
                return launch
            _WARM @ _WARM  # in a model, an operator before has the team awake
            return launch.run

        facts = {
            "dtype": "int8" if memory.packed else name, "dim": memory.dim, "group": group, "batch": batch,
            "block_size": memory.block_size, "budget": budget, "kernel_threads": threads,
        }  # fmt: skip
        return Case(kind, prepare, memory.bytes_of(batch, budget), facts)

    def bare(memory: Memory) -> list[Case]:
        if reader.way != "C" or threads > 1:
            return []
        record = 2 * memory.block_size * memory.dim * memory.dtype.itemsize

        def prepare() -> Callable[[], Any]:
            addresses = memory.addresses(1, 2048)
            return lambda: reader.runs(addresses, record)

        facts = {"dtype": name, "dim": memory.dim, "batch": 1, "block_size": memory.block_size, "kernel_threads": 1}
        return [Case("read of chosen blocks", prepare, memory.bytes_of(1, 2048), facts)]

    def sets() -> Iterator[list[Case]]:
        memory = Memory(8, 128, 32, dtype)
        shapes = ((4, 1), (3, 1), (7, 1), (4, 4))
        others = [case(memory, 4, 1, 2048, "no prefetch")]
        packed = [case(Memory(8, 128, 32, dtype, packed=True), 4, 1, 2048)] if name == "bf16" else []
        yield [
            read,
            *bare(memory),
            *(case(memory, group, batch, 2048) for group, batch in shapes),
            *others,
            *packed,
            case(memory, 4, 1, 8192, "dense"),
        ]
        for dim, block in ((64, 32), (128, 16), (128, 64), (256, 32)):
            memory = Memory(8, dim, block, dtype)
            yield [read, *bare(memory), case(memory, 4, 1, 2048)]

    return sets()


def torch_cases(name: str, read: Case) -> list[Case]:
    """Ours against torch's ways, the gather of the chosen blocks counted."""
    memory, group, budget = Memory(8, 128, 32, DTYPES[name]), 4, 2048
    slab = memory.pool.slabs[0]
    heads = torch.arange(memory.kv_heads)[:, None]
    count = budget // memory.block_size

    def gathered() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        query = torch.randn(memory.kv_heads, group, memory.dim, dtype=memory.dtype)
        return query, torch.from_numpy(memory.choose(1, count)[0].astype(np.int64)), heads, slab

    def fetch(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = slab[blocks, heads]  # [Hkv, count, 2, block, D]
        return both[:, :, 0].flatten(1, 2), both[:, :, 1].flatten(1, 2)

    def sdpa() -> Callable[[], Any]:
        query, blocks, *_ = gathered()

        def call() -> torch.Tensor:
            k, v = fetch(blocks)
            return torch.nn.functional.scaled_dot_product_attention(query[None], k[None], v[None])

        return call

    def matmul() -> Callable[[], Any]:
        query, blocks, *_ = gathered()

        def call() -> torch.Tensor:
            k, v = fetch(blocks)
            return (query @ k.mT * memory.dim**-0.5).float().softmax(-1).to(v.dtype) @ v

        return call

    def enable_gqa() -> Callable[[], Any]:
        query, blocks, *_ = gathered()

        def call() -> torch.Tensor:
            k, v = fetch(blocks)
            rows = query.reshape(1, -1, 1, memory.dim)
            return torch.nn.functional.scaled_dot_product_attention(rows, k[None], v[None], enable_gqa=True)

        return call

    nbytes, facts = memory.bytes_of(1, budget), {"dtype": name, "dim": 128, "group": group, "kernel_threads": 1}
    return [
        read,
        Case("sparse_decode", lambda: memory.decode(group, 1, budget), nbytes, facts),
        Case("torch: gather, sdpa with the group as rows", sdpa, nbytes, facts),
        Case("torch: gather, matmul, softmax, matmul", matmul, nbytes, facts),
        Case("torch: gather, sdpa with enable_gqa", enable_gqa, nbytes, facts),
    ]


def scoring_cases(read: Case) -> list[Case]:
    """Digest scoring with join and selection, over contexts of 8k, 32k and 128k tokens."""
    rng = np.random.default_rng(0)
    kv_heads, group, dim, pairs, count = 8, 4, 128, 16, 64
    row_bytes = {"submean": pairs * (dim // 2 + 4 * (dim // 16 + 1)), "quest": 4 * dim}

    def pairs_of(rows: int) -> Digest:
        codes = host_empty((rows, kv_heads, pairs * dim // 2), torch.uint8).numpy()
        codes[:] = rng.integers(0, 256, codes.shape[-1], dtype=np.uint8)
        levels = host_empty((rows, kv_heads, dim // 16, pairs), torch.int32).numpy()
        levels[:] = rng.integers(-(2**31), 2**31, levels.shape[2:]).astype(np.int32)
        sizes = host_empty((rows, kv_heads, pairs), torch.int32).numpy()
        sizes[:] = 0x3D803D80
        center, sigma = (rng.random((kv_heads, dim), dtype=np.float32) for _ in range(2))
        return submeans(codes, levels, sizes, np.zeros((rows, pairs), np.float32), center, sigma)

    def bounds_of(rows: int) -> Digest:
        vectors = host_empty((rows, kv_heads, 2 * dim), torch.int16).numpy().view(np.uint16)
        vectors[:] = 0x3C00  # 2^-7 as bfloat16
        halves = rng.standard_normal((1, kv_heads * group, 2 * dim), dtype=np.float32)
        return Vectors(halves, vectors, np.zeros(rows, np.float32))

    def case(kind: str, blocks: int) -> Case:
        nbytes = blocks * kv_heads * row_bytes[kind]
        copies = max(2, POOL_BYTES // 4 // nbytes)
        digest = (pairs_of if kind == "submean" else bounds_of)(copies * blocks)
        query = rng.standard_normal((1, kv_heads * group, dim), dtype=np.float32)
        masses = np.empty((1, kv_heads * group, blocks + 16), np.float32)
        score, tail = np.empty((1, kv_heads, blocks + 16), np.float32), np.zeros((1, kv_heads * group), np.float32)
        low = np.zeros(1, np.int32)
        chosen, counts = np.empty((1, kv_heads, count), np.int32), np.empty((1, kv_heads), np.int32)
        turn = [0]

        def prepare() -> Launch:
            turn[0] = (turn[0] + 1) % copies
            table = np.arange(turn[0] * blocks, (turn[0] + 1) * blocks, dtype=np.int32)[None]
            return choose_blocks(
                query, digest, table, blocks, masses, tail, score, join="max", scale=dim**-0.5, softcap=None,
                kv_dtype=torch.bfloat16, select=(low, low + 1, 4, blocks, count, chosen, counts),
            )  # fmt: skip

        facts = {"digest": kind, "dim": dim, "group": group, "context": 32 * blocks, "kernel_threads": 1}
        return Case("choose_blocks", prepare, nbytes, facts)

    return [read, *(case(kind, blocks) for kind in row_bytes for blocks in (256, 1024, 4096))]


def selection_cases() -> list[Case]:
    """The choice alone, against `torch.topk` alone."""
    rng = np.random.default_rng(0)
    cases = []
    for blocks in (256, 1024, 4096):
        score = rng.random((1, 8, blocks), dtype=np.float32)
        low, chosen, counts = np.zeros(1, np.int32), np.empty((1, 8, 64), np.int32), np.empty((1, 8), np.int32)

        def ours(score: Any = score, blocks: int = blocks, rest: Any = (low, chosen, counts)) -> Launch:
            return select_blocks(score, blocks, blocks, rest[0], rest[0], 0, 64, rest[1], rest[2])

        def theirs(score: Any = score) -> Callable[[], Any]:
            tensor = torch.from_numpy(score)
            return lambda: torch.topk(tensor, 64, sorted=False)

        facts = {"context": 32 * blocks, "kernel_threads": 1}
        cases += [Case("select_blocks", ours, 0, facts), Case("torch.topk", theirs, 0, facts)]
    return cases


def worker_cases(reader: Reader) -> list[Case]:
    """From handing over work that is nothing until it is done: to threads that sleep, to the team that torch uses.

    The model's thread is at work before, as in a decode step: the core of a thread that sleeps has then long halted,
    and how long it takes to come back is the machine's affair. The limit is the same hand-over in C.
    """
    worker, nowhere = Worker(), np.zeros(2, np.int64)
    small, weights = torch.ones(1, 576), torch.ones(576, 576)

    def behind_work(call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
        def prepare() -> Callable[[], Any]:
            start = time.perf_counter()
            while time.perf_counter() - start < 5e-4:
                small @ weights
            return call

        return prepare

    def nothing() -> Callable[[], Any]:
        torch.set_num_threads(2)
        launch = touch_records(nowhere, 0)
        launch.tasks, launch.cost = 2, SHARE_BYTES
        _WARM @ _WARM
        return launch.run

    hand_over = reader.server()
    alone, two = {"kernel_threads": 1}, {"kernel_threads": 2}
    return [
        *([] if hand_over is None else [Case("C: to a sleeping thread and back", behind_work(hand_over), 0, alone)]),
        Case("submitted to done", behind_work(lambda: worker.submit(lambda: None).result()), 0, alone),
        Case("run on torch's team", nothing, 0, two),
    ]


def shares(records: list[dict[str, Any]]) -> None:
    """Add each row's share of the speed at which the same turns read memory."""
    limit = next((r["gb_per_s"] for r in records if r["case"] == "read"), None)
    for record in records:
        speed = record["gb_per_s"]
        record["of_limit"] = None if limit is None or speed is None else speed / limit


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the speed of each row that reads memory beside its limit."""
    import matplotlib.pyplot as plt

    rows = [r for r in records if r.get("of_limit") is not None and r["case"] != "read"]
    names = [
        " ".join(
            str(r[k]) for k in ("case", "dtype", "dim", "group", "batch", "block_size", "digest", "context") if r.get(k)
        )
        + f" ×{r['kernel_threads']}"
        for r in rows
    ]
    figure, axes = plt.subplots(figsize=(9, 1 + len(rows) / 4), layout="constrained")
    axes.barh(names, [r["gb_per_s"] / r["of_limit"] for r in rows], color="lightgray", label="plain read")
    axes.barh(names, [r["gb_per_s"] for r in rows], label="kernel")
    axes.set(xlabel="GB/s")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def main(
    sections: Annotated[str, typer.Option(help=f"Of {', '.join(SECTIONS)}.")] = ",".join(SECTIONS),
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = ",".join(DTYPES),
    threads: Annotated[str, typer.Option(help="Threads of the decode section, comma-separated.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every row.")] = 30,
    out: OutOption = RESULTS / "bench_cpu.csv",
) -> None:
    """Measure the CPU kernels."""
    wanted, names = sections.replace(" ", "").split(","), dtypes.replace(" ", "").split(",")
    for given, allowed in ((wanted, SECTIONS), (names, tuple(DTYPES))):
        if unknown := [name for name in given if name not in allowed]:
            raise typer.BadParameter(f"unknown: {', '.join(unknown)}; choose among {', '.join(allowed)}")
    counts = [int(n) for n in threads.split(",")]
    torch.set_num_threads(1)
    reader = Reader()
    words = host_empty((POOL_BYTES // 8,), torch.int64).fill_(1).numpy().view(np.uint64)

    def read(parts: int = 1) -> Case:
        # Several threads read more, as starting them takes a while.
        size, places = READ_BYTES // 8 * (1 if parts == 1 else 4), itertools.count()

        def prepare() -> Callable[[], Any]:
            starts = [next(places) * size % (words.size - size) for _ in range(parts)]
            return on_threads(lambda: reader.words(words[(first := starts.pop()) : first + size]), parts)

        return Case("read", prepare, parts * size * 8, {"way": reader.way, "kernel_threads": parts})

    records: list[dict[str, Any]] = []

    def measure(cases: Sequence[Case], label: str) -> None:
        found = take_turns(cases, rounds, label)
        shares(found)
        records.extend(found)
        write_csv(out, records)

    for name in names:
        if "decode" in wanted:
            for count in counts:
                torch.set_num_threads(count)
                for cases in decode_cases(name, count, read(count), reader):
                    measure(cases, "decode")
        torch.set_num_threads(1)
        if "torch" in wanted:
            measure(torch_cases(name, read()), "torch")
    if "scoring" in wanted:
        measure(scoring_cases(read()), "scoring")
    if "selection" in wanted:
        measure(selection_cases(), "selection")
    if "worker" in wanted:
        measure(worker_cases(reader), "worker")
    plot(records, out.with_suffix(".png"))
    for section in dict.fromkeys(r["section"] for r in records):
        mine = [r for r in records if r["section"] == section]
        keys = dict.fromkeys(k for r in mine for k in r if k not in ("section", "way"))
        show(f"{section}: microseconds", [{k: r.get(k) for k in keys} for r in mine])


if __name__ == "__main__":
    command(main)()
