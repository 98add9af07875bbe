"""Access of kernels to host memory in their PTX: sizes, order, and untouched flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # all is compiled for a GPU
CASES = {
    "cases_merge": ("bf16 D 128 shares 16 host correction sinks",),
    "cases_handover": ("wait", "4 heads of 128, announced", "4 heads of 128"),
    "cases_kv_copy": (
        "fetch bf16 D80 block 16 int8", "fetch fp16 D128 block 32", "store_block bf16 D80 block 16",
        "store_tokens bf16 D80 block 16",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ptx() -> dict[str, list[str]]:
    """By module, the PTX of its cases."""
    pytest.importorskip("triton")
    names = [f"{module}:{name}" for module, cases in CASES.items() for name in cases]
    command = [sys.executable, str(Path(__file__).with_name("ptx.py")), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = iter(done.stdout.split("\f"))
    return {module: [next(found) for _ in cases] for module, cases in CASES.items()}


def test_waiting_reads_and_never_writes_the_flag(ptx: dict[str, list[str]]) -> None:
    waiting = ptx["cases_handover"][0]
    assert "ld.global.sys.acquire.b32" in waiting
    assert "atom." not in waiting


def test_flags_are_stored_without_atomic_operations(ptx: dict[str, list[str]]) -> None:
    """Not every bus between a GPU and its host carries them; what programs count themselves by lies on the device."""
    announced = ptx["cases_handover"][1]
    assert announced.count("atom.") == 1
    assert announced.count("st.release.sys.global.b32") == 1


def test_every_program_arrives_before_the_flag(ptx: dict[str, list[str]]) -> None:
    """All threads of a program meet, one orders what they wrote and counts it; the flag follows in release order."""
    announced, plain = (
        [
            line.split("//")[0].strip()
            for line in text.splitlines()
            if "st.global" in line or "st.release" in line or "atom" in line or "bar." in line
        ]
        for text in ptx["cases_handover"][1:]
    )
    arrival, flag = (next(i for i, line in enumerate(announced) if kind in line) for kind in ("acq_rel", "st.release"))
    assert "sys.acq_rel.add" in announced[arrival]
    assert announced[arrival - 1].startswith("bar.sync")
    assert flag == len(announced) - 1
    assert sum("st.global" in line for line in announced[arrival:flag]) == 1  # the count's return to 0
    assert any("st.global.v4" in line for line in announced[:arrival])
    assert not any("atom" in line for line in plain)


def test_host_memory_is_read_and_written_16_bytes_at_a_time(ptx: dict[str, list[str]]) -> None:
    fetching, _, storing, sending = ptx["cases_kv_copy"]
    assert "ld.global.v4.b32" in fetching
    assert "ld.global.b8" not in fetching
    assert "st.global.v4.b32" in storing
    assert "st.global.v4.b32" in sending
    assert "st.global.b16" not in sending


def test_the_merge_reads_the_host_in_one_round_trip(ptx: dict[str, list[str]]) -> None:
    """By ordinary loads of 16 bytes: strong ones, which cross the bus lane by lane, are not needed behind the wait."""
    merging = ptx["cases_merge"][0]
    assert "volatile" not in merging
    assert ".sys" not in merging
    assert "bar.sync" not in merging
    assert merging.count("ld.global.v4.b32") >= 4  # the host's output, the mean key, the predicted and the real query


def test_a_fetch_has_four_loads_under_way(ptx: dict[str, list[str]]) -> None:
    kinds = [
        kind
        for line in ptx["cases_kv_copy"][1].splitlines()
        for kind in ("ld.global.v4", "st.global.v4")
        if kind in line
    ]
    first = kinds.index("st.global.v4")
    assert kinds[:first].count("ld.global.v4") >= 4
