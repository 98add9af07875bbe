"""PTX for sm_90 of kernels in `cases_*.py`: `python ptx.py "cases_move:name" "cases_flags:name"` prints it.

It runs in a process without TRITON_INTERPRET, since interpreted kernels cannot be compiled.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when triton is imported, so before that
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = []
        for place in sys.argv[1:]:
            module, _, name = place.partition(":")
            cases = {case[0]: case[1:] for case in importlib.import_module(module).cases()}
            kernel, types, constants, options = cases[name]
            signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
            pointers = [i for i, arg in enumerate(kernel.arg_names) if signature[arg].startswith("*")]
            aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
            source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
            found.append(compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
    print("\f".join(found))
