"""The disk cache of compiled kernels: renewed by every change, whole with many processes, no condition for work."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from numba.core.caching import CompileResultCacheImpl

import hf_offload.cpu as cpu
from hf_offload.cpu.kernel_cache import _sources_of
from hf_offload.cpu.launch import jit_for_python

SCRIPT = """
import resource, sys
import numpy as np
from hf_offload.cpu.kernels.checksum import checksum_kernel, checksum_records
if "full" in sys.argv:  # a disk without room
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
words, sums = np.arange(64), np.zeros(1, np.int64)
checksum_records(np.array([words.ctypes.data]), words.nbytes, sums).run()
assert sums[0]
print(sum(checksum_kernel.stats.cache_hits.values()), sum(checksum_kernel.stats.cache_misses.values()))
"""
KERNEL = """
import sys
import numpy as np
from hf_offload.cpu.launch import Launch, kernel
import helper
from helper import FACTOR, twice

@kernel
def scale(ticket, tasks, values):
    for i in range(values.size):
        values[i] = {call}(values[i]) * {factor}
    ticket[0] = ticket[1] = tasks

if __name__ == "__main__":
    values = np.ones(3, sys.argv[1])
    Launch(scale, 1, (values,), 0).run()
    print(values[0], sum(scale.stats.cache_hits.values()))
"""
HELPER = "from hf_offload.cpu.launch import jit\nFACTOR = {0}\n@jit\ndef twice(x):\n    return {1} * x\n"
PACKAGE = str(Path(cpu.__file__).parents[2])


def run(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("compiled kernels are not kept on disk" in done.stderr) == ("full" in arguments)
    return done.stdout.strip()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of `hf_offload.cpu`, whose kernels are not compiled yet."""
    source = Path(cpu.__file__).parent
    shutil.copytree(source, tmp_path / "hf_offload" / "cpu", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "hf_offload" / "__init__.py").touch()
    return tmp_path


def change(file: Path) -> None:
    with file.open("a") as opened:
        opened.write("\n# changed\n")


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["memory.py", "simd/convert.py"])
def test_a_change_in_another_file_makes_compiled_code_stale(copied: Path, changed: str) -> None:
    def kept() -> set[Path]:
        return set(copied.rglob("checksum.checksum_kernel*.nbc"))

    assert run(copied, "-c", SCRIPT) == "0 1"
    assert run(copied, "-c", SCRIPT) == "1 0"
    before = kept()
    change(copied / "hf_offload" / "cpu" / changed)
    assert run(copied, "-c", SCRIPT) == "0 1"
    assert len(kept()) == 1
    assert not before & kept()  # what nobody can use is deleted


@pytest.mark.slow
def test_damaged_files_are_compiled_again_and_a_full_disk_keeps_none(copied: Path) -> None:
    assert run(copied, "-c", SCRIPT, "full") == "0 1"
    assert not list(copied.rglob("*.nb*"))
    assert run(copied, "-c", SCRIPT) == "0 1"
    damages: list[Callable[[bytes], bytes]] = [
        lambda content: content[:-9],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"",
    ]
    for damage in damages:
        for file in list(copied.rglob("*.nbc")):
            file.write_bytes(damage(file.read_bytes()))
        assert run(copied, "-c", SCRIPT) == "0 1"
        assert run(copied, "-c", SCRIPT) == "1 0"


@pytest.mark.slow
def test_processes_that_compile_at_once_keep_all_they_compile(tmp_path: Path) -> None:
    (tmp_path / "scale.py").write_text(KERNEL.format(call="twice", factor="FACTOR"))
    (tmp_path / "helper.py").write_text(HELPER.format(1, 2))
    kinds, environment = ("int64", "float32", "float64"), {**os.environ, "PYTHONPATH": PACKAGE}
    started = [subprocess.Popen([sys.executable, "scale.py", kind], cwd=tmp_path, env=environment) for kind in kinds]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert all(run(tmp_path, "scale.py", kind, PYTHONPATH=PACKAGE).endswith(" 1") for kind in kinds)


def test_the_sources_of_a_function_are_all_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper.py").write_text(HELPER.format(1, 2))
    (tmp_path / "table.py").write_text("import numpy\nTABLE = numpy.arange(3)\n")
    (tmp_path / "between.py").write_text(
        "import numpy, helper\nfrom table import TABLE\nfrom hf_offload.cpu.launch import jit\n@jit\n"
        "def between(x):\n    return helper.twice(numpy.exp(x)) + TABLE[0]\n"
    )
    (tmp_path / "scale.py").write_text(KERNEL.format(call="between", factor="FACTOR") + "from between import between\n")
    function = importlib.import_module("scale").scale.py_func
    sources = _sources_of(function)
    for name in ("helper", "table", "between", "scale"):
        change(tmp_path / f"{name}.py")
        if name != "table":  # which has no compiled function: of its reading nobody is told
            assert _sources_of(function) == sources  # what is compiled now is of the file as it was
        importlib.reload(sys.modules[name])
        assert _sources_of(function) != sources
        sources = _sources_of(function)
    for name in ("helper", "table", "between", "scale"):
        del sys.modules[name]


def test_without_a_folder_kernels_are_compiled_by_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    with pytest.warns(RuntimeWarning, match=r"not kept on disk.*NUMBA_CACHE_DIR"):
        compiled = jit_for_python(lambda x: x + 1)
    assert compiled(1) == 2
    assert not compiled.stats.cache_hits  # type: ignore[attr-defined]
