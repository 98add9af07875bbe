"""Compilation of kernels without a GPU: `python compiling.py 90` compiles the cases of every `cases_*.py` here.

It runs in a separate process without TRITON_INTERPRET, since interpreted kernels cannot be compiled, and prints one
line of JSON for each case. The function `cases()` of a module returns tuples (name, kernel, signature: the type of each
argument, constants: the value of each constexpr, options: num_warps and num_stages).
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes that one program may have
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
BUFFERS = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")


def compile_case(
    capability: int, kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: Any
) -> dict:
    """Compile a kernel, with pointers aligned as torch aligns them, and tell what it takes of a multiprocessor."""
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name].startswith("*")}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = USAGE.search(told.stdout + told.stderr)
    assert usage is not None, told.stdout + told.stderr
    registers, stack, local = map(int, usage.groups())
    depth = {"stages": options.get("num_stages"), "buffers": [int(n) for n in BUFFERS.findall(compiled.asm["ttgir"])]}
    return {"registers": registers, "spilled": stack + local, "shared": compiled.metadata.shared, **depth}


def all_cases() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The cases of every `cases_*.py` in this folder, named after their files."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        subject = path.stem.removeprefix("cases_")
        for name, *case in module.cases():
            yield f"{subject}: {name}", *case


if __name__ == "__main__":
    target = int(sys.argv[1])
    for case, *what in all_cases():
        told = {
            "case": case,
            "kernel": what[0].fn.__name__,
            "limit": SHARED_MEMORY[target],
            **compile_case(target, *what),
        }
        print(json.dumps(told), flush=True)
