"""Functions that compiled code alone calls become part of their callers."""

import importlib
import sys
from pathlib import Path

import pytest

from hf_offload.cpu.launch import Launch

SOURCE = """
from typing import NamedTuple
from hf_offload.cpu.launch import by_class, jit, jit_for_python

class Number(NamedTuple):
    value: float

@jit
def root(x):
    if x < 0:
        raise ValueError("no root of", x)
    return x**0.5

@jit
def fourth_root(x):
    return root(root(x))

def root_of_number(number):
    if number.value < 0:
        raise ValueError("no root of", number.value)
    return root(number.value)

chosen_root = by_class({Number: root_of_number}, allocating=True)

@jit_for_python
def roots(x):
    return root(x), fourth_root(x)

@jit_for_python
def chosen(x):
    return chosen_root(Number(x))
"""


def test_a_function_and_its_errors_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error with a value of run time reads the function's environment, which only the caller's code can hold."""
    (tmp_path / "linked_roots.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    for from_disk in (False, True):
        sys.modules.pop("linked_roots", None)
        module = importlib.import_module("linked_roots")
        assert module.roots(16.0) == (4.0, 2.0)
        assert bool(module.roots.stats.cache_hits) == from_disk
        with pytest.raises(ValueError, match=r"no root of.*-1\.0"):
            module.roots(-1.0)
        assert module.chosen(16.0) == 4.0
        assert bool(module.chosen.stats.cache_hits) == from_disk
        with pytest.raises(ValueError, match=r"no root of.*-1\.0"):
            module.chosen(-1.0)
    with pytest.raises(TypeError, match="jit_for_python"):
        module.root(16.0)
    with pytest.raises(TypeError, match="not made by `kernel`"):
        Launch(module.root, 1, (16.0,), 0).run()
