"""The disk cache of compiled kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hf_offload.cpu as cpu

SCRIPT = """
from kernels.select import select_kernel
import numpy as np
i, f = np.zeros(1, np.int32), np.zeros((1, 1, 1), np.float32)
select_kernel(np.ones(3, np.int64), 0, f, 1, 1, i, i, 0, 0, i[None, None], i[None])
stats = select_kernel.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_a_change_in_another_file_makes_compiled_code_stale(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    for file in Path(cpu.__file__).parent.glob("*.py"):
        if file.name != "worker.py":  # it names the package
            (folder / file.name).write_text(file.read_text())

    def run() -> str:
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run() == "0 1"
    assert run() == "1 0"
    for damage in (lambda index: index.replace(b"types.npytypes", b"types.oldtypes"), lambda index: index[:-9]):
        for index in (folder / "__pycache__").glob("*.nbi"):
            index.write_bytes(damage(index.read_bytes()))
        assert run() == "0 1"  # of types that are gone, or cut short: compiled again
        assert run() == "1 0"
    with (folder / "vector.py").open("a") as file:
        file.write("\n# changed\n")
    assert run() == "0 1"
