"""Systems without Linux's features: import, and equal tokens on the CPU."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_offload

FORBIDDEN = ("fcntl", "grp", "posix", "pwd", "resource", "termios", "triton")
"""What some system lacks."""

SCRIPT = """
import ctypes, mmap, os, sys
import torch, transformers, numba.core.registry, llvmlite.binding  # these know their system and have what they need
from tiny import prompt, tiny_model

sys.platform = {platform!r}
for module, names in (
    (os, ("sched_getaffinity", "sched_setaffinity", "register_at_fork", "fork", "sysconf", "getpgid")),
    (mmap, ("MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS", "PROT_READ")),
):
    for name in names:
        vars(module).pop(name, None)

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in {hidden!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Hidden)
real = ctypes.CDLL
def refuse(name, *args, **kwargs):
    raise OSError(f"{{name}}: no such library")
ctypes.CDLL = refuse

import hf_offload
from hf_offload.blocks.memory import host_empty
from hf_offload.cpu import openmp_team as team
from hf_offload.gpu import backend

assert backend.triton is None and team.team()[0] == 0
assert host_empty((1 << 23,), torch.uint8).numel() == 1 << 23  # elsewhere on huge pages
model = tiny_model("llama", "sdpa")
ids, mask = prompt(2, 300)
arguments = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
want = model.generate(ids, **arguments)
for options in ({{}}, dict(tier="split", lookahead="select", resident=256)):
    with hf_offload.enabled(model, budget=512, **options):
        assert torch.equal(model.generate(ids, **arguments), want), options
print("the same tokens")
"""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_cpu_path_needs_nothing_of_linux(platform: str) -> None:
    source = SCRIPT.format(platform=platform, hidden=FORBIDDEN)
    places = [str(Path(__file__).parent), str(Path(hf_offload.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the same tokens" in done.stdout


def test_no_file_needs_what_some_system_lacks_to_be_imported() -> None:
    """Triton is imported in one place, which may fail; kernels have it from there."""
    package = Path(hf_offload.__file__).parent
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for nodes, forbidden in ((tree.body, set(FORBIDDEN)), (ast.walk(tree), {"triton"})):
            names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
            missing = {name.partition(".")[0] for name in names} & forbidden
            assert not missing or path == package / "gpu" / "backend.py", f"{path.name}: {missing}"
