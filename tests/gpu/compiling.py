"""Compilation of kernels without a GPU: `python compiling.py 90` compiles what the operations launch at real sizes.

It runs in a process of its own without TRITON_INTERPRET, since interpreted kernels cannot be compiled, and prints one
line of JSON for each launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import operations as of
import torch
import triton
from torch import bfloat16, float16, float32
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hf_offload.gpu import backend
from hf_offload.gpu.handover import Inbox, hand_over, wait_for_flag

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes that one program may have
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
TYPES = {
    float32: "fp32", float16: "fp16", bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "i1",
}  # fmt: skip
RECORDS = [(bfloat16, 32, 64), (bfloat16, 16, 80), (float16, 32, 128), (bfloat16, 64, 256), (float32, 8, 128)]
LISTINGS = [  # dtype, group, D, block size, with softcap and padding
    (bfloat16, 7, 64, 16, False), (bfloat16, 4, 128, 32, False), (bfloat16, 4, 128, 32, True),
    (bfloat16, 2, 256, 64, True), (float16, 1, 80, 32, False), (float32, 4, 128, 32, False),
    (float32, 2, 256, 128, True),
]  # fmt: skip
AVERAGES = [(bfloat16, 4, 128, 32, True), (float16, 1, 80, 16, False), (float32, 2, 256, 64, True)]
SETS = [(64, 1024, True), (128, 4096, False), (256, 8192, False), (512, 16384, True), (1024, 16384, True)]
KEYS = [(bfloat16, 32, 128), (float16, 8, 80), (float32, 128, 256), (bfloat16, 64, 64)]
SUBMEANS = [(4, 16, 128), (7, 8, 64), (1, 16, 80), (3, 4, 96), (2, 64, 256), (16, 32, 128)]  # group, pairs, D


def call(operation: Callable[..., Any], **arguments: Any) -> of.Case:
    return of.Case(operation, arguments, lambda *result, **given: None)


def hand_over_case(group: int, dim: int, flagged: bool, tail: bool) -> of.Case:
    sent = torch.zeros(1, 8 * group, dim), torch.zeros(1, 8, 64).int(), torch.zeros(1, 8).int()
    more = (torch.zeros(1, 8 * group), of.numbers(0, 0)) if tail else (None, None)
    to = Inbox(*sent, of.numbers(0), *more)
    names = ("query", "blocks", "counts", "tail", "limits")
    flags = {"flag": of.numbers(0), "epoch": of.numbers(1)} if flagged else {}
    return call(hand_over, to=to, **dict(zip(names, (*sent, *more), strict=True)), **flags)


def cases() -> Iterator[tuple[str, of.Case]]:
    """Calls with the sizes of real models."""
    for blocks in (64, 4096, 8192, 16384):
        yield f"select {blocks}", of.select_blocks(torch.randn(1, 1, blocks), blocks, blocks * 8, [0], [1], 4, 16)
    for capacity in (128, 2500):
        yield f"split {capacity}", of.split_blocks((capacity, capacity))
    for group, width, softcap in ((4, 128, None), (7, 160, 2.0), (2, 512, 2.0)):
        yield f"vectors {group} {width} {softcap}", of.score_vectors((group, width, 9, 8), softcap)
    for group, pairs, dim in SUBMEANS:
        softcap = 2.0 if pairs == 8 or dim == 256 else None
        yield f"submeans {group} {pairs} {dim}", of.score_submeans((pairs, dim, group, 9, 8), softcap)
    for group, join in ((1, "raw"), (4, "max"), (7, "mean"), (16, "max")):
        yield f"join {group} {join}", of.join_heads((group, 9, 8), join, True)
    for slots, blocks, due in SETS:
        at = of.resident_set(0, slots, blocks, sealed=blocks - 1)
        yield f"exchange {slots} {blocks}", of.exchange_blocks(at, sealed=blocks - 1, recent=4, due=1 if due else None)
    for slots in (16, 1024):
        yield f"open {slots}", of.open_block(of.resident_set(0, slots, 1026, sealed=1025), sealed=1025, recent=4)
    for group, dim in ((4, 128), (1, 80), (16, 256)):
        for flagged, tail in ((False, False), (True, False), (True, True)):
            name = f"hand_over {group} {dim}{' flag' * flagged}{' tail' * tail}"
            yield name, hand_over_case(group, dim, flagged, tail)
    yield "wait", call(wait_for_flag, flag=of.numbers(0), epoch=of.numbers(1), late=of.numbers(0), spins=1)
    for dtype, size, dim in RECORDS:
        name, shape = f"{TYPES[dtype]} D{dim} block {size}", (8, 8, size, dim)
        yield f"write_token {name}", of.write_token(dtype, shape, 0)
        yield f"store_block {name}", of.store_block(dtype, shape)
        yield f"store_tokens {name}", of.store_tokens(dtype, (shape, "turned", 5, 9))
        for packed in (False, True):
            yield f"fetch {name}{' int8' * packed}", of.fetch(dtype, shape, packed)
    for dtype, dim, splits, full in ((bfloat16, 128, 16, True), (float16, 80, 1, False), (float32, 256, 64, True)):
        kind = "corrected" if full else "no host"
        yield f"merge {TYPES[dtype]} {dim} {splits}", of.merge_parts(dtype, (splits, 32, dim), kind, full)
    for dtype, group, dim, size, full in LISTINGS:
        given = (dtype, (8, group, dim, size, 3), full, 2.0 if full else None)
        yield f"attend {TYPES[dtype]} {group} {dim} {size} {full}", of.attend(*given, "as the pool")
    for dtype, group, dim, size, full in AVERAGES:
        given = (dtype, (8, group, dim, size, 3), full, 2.0 if full else None)
        yield f"averages {TYPES[dtype]} {dim}", of.move_averages(*given, full)
    for dtype, tokens, dim in KEYS:
        yield f"seal_submeans {TYPES[dtype]} {tokens} {dim}", of.seal_submeans(dtype, (tokens, dim))
        for bounds in (True, False):
            yield f"seal_vectors {TYPES[dtype]} {tokens} {dim} {bounds}", of.seal_vectors(dtype, (tokens, dim), bounds)


def launches(case: of.Case) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """(kernel, its arguments, options) of what a call would launch on a device."""
    found: list[Any] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in list(named) if name not in kernel.arg_names}
        found.append((kernel, kernel.signature.bind(*args, **named).arguments, options))

    run, JITFunction.run = JITFunction.run, record
    backend.ON_TRITON.add("cpu")
    try:
        case.operation(**case.arguments)
    finally:
        backend.ON_TRITON.discard("cpu")
        JITFunction.run = run
    return found


def compile_for(capability: int, kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Compile a kernel, with pointers aligned as torch aligns them, and tell what it takes of a multiprocessor."""
    fixed = {each.name for each in kernel.params if each.is_constexpr or arguments[each.name] is None}
    types = {
        name: "constexpr" if name in fixed else f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor)
        else "fp32" if isinstance(value, float) else "i32"
        for name, value in arguments.items()
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name].startswith("*")}
    source = ASTSource(kernel, types, constexprs={name: arguments[name] for name in fixed}, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = USAGE.search(told.stdout + told.stderr)
    assert usage is not None, told.stdout + told.stderr
    registers, stack, local = map(int, usage.groups())
    return {
        "kernel": kernel.fn.__name__, "registers": registers, "spilled": stack + local,
        "shared": compiled.metadata.shared, "limit": SHARED_MEMORY[capability], "ptx": compiled.asm["ptx"],
    }  # fmt: skip


if __name__ == "__main__":
    for name, case in cases():
        for launch in launches(case):
            print(json.dumps({"case": name, **compile_for(int(sys.argv[1]), *launch)}), flush=True)
