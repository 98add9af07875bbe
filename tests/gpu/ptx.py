"""Print the PTX for sm_90 of some kernels of `cases_*.py`: ptx.py "cases_kv_copy:name" "cases_handover:wait"`.

Interpreted kernels cannot be compiled: what asks for it runs in a process without TRITON_INTERPRET.
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
