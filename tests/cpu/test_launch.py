"""The disk cache of compiled kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_offload.cpu as cpu

SCRIPT = """
import numpy as np
from hf_offload.cpu.kernels.checksum import checksum_kernel, checksum_records
words, sums = np.arange(64), np.zeros(1, np.int64)
checksum_records(np.array([words.ctypes.data]), words.nbytes, sums).run()
assert sums[0]
print(sum(checksum_kernel.stats.cache_hits.values()), sum(checksum_kernel.stats.cache_misses.values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["memory.py", "simd/convert.py"])
def test_a_change_in_another_file_makes_compiled_code_stale(tmp_path: Path, changed: str) -> None:
    folder = tmp_path / "hf_offload" / "cpu"
    shutil.copytree(Path(cpu.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hf_offload" / "__init__.py").touch()

    def run() -> str:
        done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def damage(change: Callable[[bytes], bytes]) -> None:
        indices = list(folder.rglob("*.nbi"))
        assert indices
        for index in indices:
            index.write_bytes(change(index.read_bytes()))

    assert run() == "0 1"
    assert run() == "1 0"
    damage(lambda index: index.replace(b"types.npytypes", b"types.oldtypes"))  # types that are gone
    assert run() == "0 1"
    assert run() == "1 0"
    damage(lambda index: index[:-9])  # cut short
    assert run() == "0 1"
    assert run() == "1 0"
    with (folder / changed).open("a") as file:
        file.write("\n# changed\n")
    assert run() == "0 1"
